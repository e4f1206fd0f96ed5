"""Cosmos3's prompt: sentences about the video, a chat around it, and token ids. The transformer embeds those itself.

    "A cat walks"  -- dress -->  "A cat walks. The video is 7.9 seconds long … This video is of 720x1280 resolution."
                   -- chat -->   "<|im_start|>system … <|im_start|>user … <|im_start|>assistant\\n"
                   -- ChatTokenizer -->  ids (n,), <|im_end|> and <|vision_start|> last; nothing is cleaned, cut or padded

The negative prompt takes the same way, its sentences with "is not". A prompt that is a JSON object stands for itself:
the model was also trained on such descriptions, and they carry the sentences' facts as fields.
"""

import json
from pathlib import Path

from tokenizers import Tokenizer

from nanovgen.recipe import read_json

MARKS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>")


def json_prompt(prompt: str) -> str | None:
    """A prompt that is a JSON object, or @FILE.json that holds one, in json.dumps's spelling; None: it is plain text."""
    if prompt.startswith("@") and prompt.endswith(".json"):
        return json.dumps(read_json(Path(prompt[1:])))
    try:
        content = json.loads(prompt)
    except (ValueError, RecursionError):
        return None
    return json.dumps(content) if isinstance(content, dict) else None


def read_negative(folder: Path) -> str | None:
    """The negative prompt that a checkpoint folder brings along, as JSON text, or None."""
    path = folder / "assets" / "negative_prompt.json"
    return json.dumps(read_json(path)) if path.is_file() else None


def join(text: str, sentence: str) -> str:
    """Add a sentence. All full stops at the end become one; one in another script stays, and gets one more."""
    text = text.rstrip(".")
    return f"{text}. {sentence}" if text else sentence


def dress(
    prompt: str, frames: int, fps: float, size: tuple[int, int], sentences: bool | None = None, negative: bool = False
) -> str:
    """The user's part of the chat; size is (width, height). `sentences` None: for plain text, not for JSON.

    One frame is an image: it has no duration.
    """
    described = json_prompt(prompt)
    text = prompt if described is None else described
    if not (described is None if sentences is None else sentences):
        return text
    no, (width, height) = " not" if negative else "", size
    if frames != 1:
        text = join(text, f"The video is{no} {frames / fps:.1f} seconds long and is{no} of {fps:.0f} FPS.")
    return join(text, f"This {'image' if frames == 1 else 'video'} is{no} of {height}x{width} resolution.")


def chat(text: str, frames: int, system: bool = True) -> str:
    """The whole conversation, up to where the answer begins. "give" is as the model was trained."""
    made = "images" if frames == 1 else "videos"
    turns = [("system", f"You are a helpful assistant who will generate {made} from a give prompt.")] if system else []
    said = "".join(f"<|im_start|>{who}\n{what}<|im_end|>\n" for who, what in [*turns, ("user", text)])
    return f"{said}<|im_start|>assistant\n"


class ChatTokenizer:
    """A checkpoint's text_tokenizer folder: byte-level BPE, in which the marks of a chat are tokens of their own."""

    def __init__(self, folder: Path):
        path = folder / "tokenizer.json"
        try:
            self.tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library has no narrower one
            raise ValueError(f"{path} cannot be read: {error}") from None
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self.marks = {mark: self.tokenizer.token_to_id(mark) for mark in MARKS}
        if split := [mark for mark, i in self.marks.items() if self.encode(mark) != [i]]:
            raise ValueError(f"{path} has no token {split[0]}; Cosmos3 needs {', '.join(MARKS)}")

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def __call__(self, text: str) -> list[int]:
        """Ids of a chat, and of the two marks after which the video begins. Marks in the user's words count as marks."""
        return [*self.encode(text), self.marks["<|im_end|>"], self.marks["<|vision_start|>"]]
