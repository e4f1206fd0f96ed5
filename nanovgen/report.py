"""The planner's pictures and its page: one HTML file with all in it, no script, that a phone can read.

The page shows the chosen mesh as a grid of ranks, the ranking, the parts of a step, how time falls with the ranks, what was
published beside what the model says, and, from JSON files of nanovgen.bench --out, what was measured beside it.
"""

import argparse
import base64
import io
import json
from collections.abc import Iterator
from html import escape
from pathlib import Path

import torch

from nanovgen import article, bench, choose, cost, machines, plan
from nanovgen.choose import Choice, Ranking
from nanovgen.job import Job
from nanovgen.recipe import ParallelConfig

COUNTS = (1, 2, 4, 8, 16, 32, 64, 72)
KINDS = {"attention": ("attention", "cross-attention"), "linears": ("linears",),
         "norms, merges, copies": ("rest", "merges", "copies"),
         "exchanges": ("ulysses", "ring", "kv_axis", "q_axis", "tp", "seq", "cfg"), "replicated": ("replicated",)}  # fmt: skip
COLOURS = ("#4269d0", "#6cc5b0", "#efb118", "#ff725c", "#7a7a7a")
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1b1e23; background: #fff }
body { margin: 0 auto; padding: 12px; max-width: 960px }
h1 { font-size: 1.5rem; line-height: 1.25 } h2 { font-size: 1.15rem; margin-top: 2rem } p, li { overflow-wrap: anywhere }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: .875rem }
th, td { text-align: right; padding: 4px 8px; border-bottom: 1px solid #d9dde3; white-space: nowrap }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: #fff }
tr.best td { background: #eef3ff }
img { width: 100%; height: auto } .halves { display: flex; flex-wrap: wrap; gap: 16px }
.half { flex: 1 1 320px } .grid { display: grid; gap: 4px }
.cell { border-radius: 6px; padding: 4px; display: flex; flex-wrap: wrap; gap: 2px; justify-content: center }
.cell b { font: 600 12px/22px system-ui; min-width: 24px; text-align: center; background: #ffffffcc; border-radius: 4px }
.cell b.vae { outline: 2px solid #1b1e23 }
"""


def write(args: argparse.Namespace, job: Job, found: Ranking) -> None:
    """--picture and --report. Raises ValueError where matplotlib or a measured file is missing."""
    measured = [row for path in args.measured for row in read_measured(path)]
    curve = scaling(job, args, found)
    png = picture(found, curve, args.model)
    if args.picture:
        args.picture.write_bytes(png)
        print(f"picture   {args.picture}")
    if args.report:
        args.report.write_text(page(found, png, args.model, curve, measured))
        print(f"report    {args.report}")


def scaling(job: Job, args: argparse.Namespace, found: Ranking) -> dict[int, Choice]:
    """The best recipe by number of GPUs, up to those asked for; where none fits, none."""
    memory, curve = args.memory * 1e9 if args.memory else found.machine.memory, {}
    for world in [n for n in COUNTS if n < args.gpus]:
        if choices := choose.rank(job, world, found.machine, found.kernel, memory).choices:
            curve[world] = choices[0]
    return curve | {args.gpus: found.choices[0]}


def by_kind(choice: Choice) -> dict[str, float]:
    """Seconds of a step, in five kinds."""
    return {kind: sum(choice.terms[term] for term in terms) for kind, terms in KINDS.items()}


def picture(found: Ranking, curve: dict[int, Choice], model: str) -> bytes:
    """PNG: denoise and request against the ranks, and the parts of a step of the best recipes; narrow, for a phone."""
    try:
        from matplotlib.figure import Figure  # without pyplot: no window, no global state
    except ImportError:
        raise ValueError("the picture needs matplotlib: pip install nanovgen[plan]") from None
    figure = Figure(figsize=(6, 8.5), dpi=150, layout="constrained")
    top, bottom = figure.subplots(2, height_ratios=(1, 1.1))
    worlds = list(curve)
    for name, seconds, style in (("denoise", [c.parts["denoise"] for c in curve.values()], "o-"),
                                 ("whole request", [c.total for c in curve.values()], "s-"),
                                 ("denoise, if it divided evenly",
                                  [curve[worlds[0]].parts["denoise"] * worlds[0] / n for n in worlds], ":")):  # fmt: skip
        top.loglog(worlds, seconds, style, label=name)
    top.set(xlabel="GPUs", ylabel="seconds")
    figure.suptitle(f"{model} on {found.machine.name},\nthe best recipe of each count", fontsize="medium")
    top.set_xticks(worlds, [str(n) if n == worlds[-1] or 1.3 * n < worlds[-1] else "" for n in worlds])
    top.minorticks_off()
    top.legend()
    top.grid(alpha=0.3)
    best = found.choices[:8]
    left = [0.0] * len(best)
    for kind, colour in zip(KINDS, COLOURS, strict=True):
        widths = [1e3 * by_kind(c)[kind] for c in best]
        bottom.barh(range(len(best)), widths, left=left, color=colour, label=kind)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for i, c in enumerate(best):
        bottom.text(0.01 * left[0], i, c.name, va="center", color="white", fontsize="small")
    bottom.set_yticks([])
    bottom.invert_yaxis()
    bottom.set(xlabel="ms a denoising step")
    figure.legend(*bottom.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()


def read_measured(path: Path) -> Iterator[tuple[str, str, float, float]]:
    """Device and model, recipe, seconds of a turn measured and predicted, of each row of a bench's JSON."""
    try:
        found = json.loads(path.read_text())
        args = bench.parse(found["argv"])
        args.attention, args.device, args.recipe, asked = "auto", "cpu", "1gpu", args.attention  # here nothing is run
        made = bench.make_bench(args)
        rows = [(ParallelConfig(**row["recipe"] | {"attn2d_size": tuple(row["recipe"]["attn2d_size"])}), row["seconds"]["turn"])
                for row in found["rows"]]  # fmt: skip
        m, note = machines.of_device(found["device"], found["world"], found["world"])
    except (OSError, KeyError, TypeError, ValueError, SystemExit) as error:
        raise ValueError(f"{path} is no JSON of nanovgen.bench --out: {error!r}") from None
    kernel = asked if asked in m.attention else next(iter(m.attention))
    load = cost.load_of(made.preset, made.config, made.latent, 1)
    for parallel, seconds in rows:
        turn = sum(cost.step(m, kernel, parallel, load).values()) * parallel.cfg_size / 2
        yield f"{found['device']}{note}: {args.model}, {load.work.tokens} tokens, {kernel}", plan.name_of(parallel), seconds, turn


# The page


def page(found: Ranking, png: bytes, model: str, curve: dict[int, Choice], measured: list[tuple]) -> str:
    m, best, load = found.machine, found.choices[0], found.load
    f, y, x = load.work.latent
    what = f"{escape(model)} on {best.parallel.world} GPUs"
    parts = [
        f"<h1>{what} of {escape(m.name)}</h1>",
        f"<p>{load.work.tokens} tokens (latents {f} x {y} x {x}), {load.steps} steps of {load.streams} guidance streams. "
        f"Predicted with the fastest recipe, <b>{best.name}</b>: {1e3 * best.step:.1f} ms a step, {best.parts['denoise']:.2f} s "
        f"of denoising, {best.total:.2f} s a request (weights loaded and code compiled before), {best.memory / 1e9:.0f} GB a "
        "GPU.</p>",
        "<h2>The mesh</h2>", mesh(best.parallel), "<h2>Why this one</h2>",
        items([*choose.reasons(found), f"On every rank, whatever the degrees: {choose.replicated(found, best)}."]),
        "<h2>The ranking</h2>", ranking(found),
        "<h2>Scaling, and the parts of a step</h2>",
        f'<img alt="Seconds by GPUs; parts of a step" src="data:image/png;base64,{base64.b64encode(png).decode()}">',
        table(["GPUs", "recipe", "denoise s", "request s", "GB"],
              [[n, c.name, f"{c.parts['denoise']:.2f}", f"{c.total:.2f}", f"{c.memory / 1e9:.0f}"] for n, c in curve.items()]),
        "<h2>Left out</h2>",
        items([f"{count} recipes such as {name}: {words}" for count, name, words in found.refused.values()] or ["nothing"]),
        "<h2>Measured</h2>", measurements(measured), "<h2>Published, and the model</h2>", published(),
        "<h2>The machine's constants</h2>", items([f"{constants}: {source}" for constants, source in m.sources.items()]),
    ]  # fmt: skip
    view = '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
    head = f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{what}</title>{view}<style>{STYLE}</style></head>'
    return f"{head}<body>{''.join(parts)}</body></html>\n"


def items(lines: list[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def table(head: list[str], rows: list[list], best: int | None = None) -> str:
    cells = lambda row, tag: "".join(f"<{tag}>{escape(str(cell))}</{tag}>" for cell in row)  # noqa: E731
    body = "".join(f"<tr{' class=best' if i == best else ''}>{cells(row, 'td')}</tr>" for i, row in enumerate(rows))
    return f'<div class="wide"><table><tr>{cells(head, "th")}</tr>{body}</table></div>'


def ranking(found: Ranking, top: int = 12) -> str:
    axes = list(dict.fromkeys(axis for c in found.choices[:top] for axis in c.sent))
    rows = [[c.name, f"{1e3 * c.step:.1f}", *(f"{seconds:.2f}" for seconds in (c.parts["denoise"], c.parts["decode"], c.total)),
             f"{c.memory / 1e9:.0f}", *(f"{c.sent.get(axis, 0) / 1e6:.0f}" for axis in axes)]
            for c in found.choices[:top]]  # fmt: skip
    head = ["recipe", "ms/step", "denoise s", "decode s", "request s", "GB", *(f"{axis} MB" for axis in axes)]
    return table(head, rows, best=0)


def mesh(parallel: ParallelConfig) -> str:
    """Ranks in their places: a half of CFG a block, Attention2D's rows and columns (or the ring) its cells, Ulysses inside."""
    sizes = plan.degrees(parallel)
    ranks, blocks = torch.arange(parallel.world).view(*sizes.values()), []  # cfg, tp, ring, rows, columns, ulysses
    for half in range(sizes["cfg"] * sizes["tp"]):
        cells = ranks.flatten(0, 1)[half].flatten(0, 1)  # ring x rows (one of them is 1), columns, ulysses
        if parallel.ring_size > 1:
            cells = cells.transpose(0, 1)  # a ring reads best along a line
        name = f"CFG half {half // sizes['tp']}" if sizes["cfg"] > 1 else "All ranks"
        name += f", tensor slice {half % sizes['tp']}" if sizes["tp"] > 1 else ""
        boxes = "".join(cell(box.tolist(), row, cells.shape[0], parallel) for row, line in enumerate(cells) for box in line)
        columns = f"grid-template-columns: repeat({cells.shape[1]}, minmax(0, 1fr))"
        blocks.append(f'<div class="half"><p>{name}</p><div class="grid" style="{columns}">{boxes}</div></div>')
    return f"<p>{escape(legend(parallel))}</p><div class=halves>{''.join(blocks)}</div>"


def cell(ranks: list[int], row: int, rows: int, parallel: ParallelConfig) -> str:
    decoders = parallel.parallel_vae_size if parallel.parallel_vae_size > 1 else 0
    inside = "".join(f"<b{' class=vae' if rank < decoders else ''}>{rank}</b>" for rank in ranks)
    return f'<div class="cell" style="background: hsl({360 * row // rows} 65% 82%)">{inside}</div>'


def legend(parallel: ParallelConfig) -> str:
    said = []
    if parallel.attn2d_size != (1, 1):
        said.append("a row of one colour shares queries and merges its parts, a column shares keys")
    if parallel.ring_size > 1:
        said.append("keys and values travel along the line of cells and back to its start")
    if parallel.ulysses_size > 1:
        said.append("ranks of a cell swap tokens for heads (Ulysses)")
    if parallel.cfg_size > 1:
        said.append("the rank in the same place of the other half runs the other guidance stream")
    if parallel.tp_size > 1:
        said.append("ranks in the same place of all slices hold one model between them")
    if parallel.parallel_vae_size > 1:
        said.append("outlined ranks decode")
    return (". ".join(text[0].upper() + text[1:] for text in said) or "One rank does all") + "."


def measurements(rows: list[tuple]) -> str:
    if not rows:
        return "<p>No files of nanovgen.bench --out were given.</p>"
    return table(["on", "recipe", "turn s, measured", "predicted", "error"],
                 [[where, name, f"{seconds:.3f}", f"{turn:.3f}", f"{turn / seconds - 1:+.1%}"]
                  for where, name, seconds, turn in rows])  # fmt: skip


def published() -> str:
    rows = [[f"{row.model} {plan.name_of(row.parallel)}", row.machine, row.parallel.world, f"{row.seconds:.2f}",
             f"{(found := article.denoise(row)):.2f}", f"{found / row.seconds - 1:+.1%}", row.source]
            for row in article.FITTED + article.PREDICTED]  # fmt: skip
    return table(["denoise", "machine", "GPUs", "published s", "model s", "error", "source"], rows)
