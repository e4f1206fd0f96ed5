"""The HTTP face of a server: OpenAI's videos API, what VisualGen adds to it, progress, health and figures.

    GET  /health                        200 when warm; 503 before, and when a rank was lost
    POST /v1/videos                     202 and the job     POST /v1/videos/sync       the MP4, when it is done
    GET  /v1/videos                     all of them         GET  /v1/videos/ID         one
    GET  /v1/videos/ID/content          the MP4             GET  /v1/videos/ID/events  each step, as server-sent events
    GET  /v1/videos/ID/preview          the latents now     DELETE /v1/videos/ID       stop it, or forget it
    GET  /metrics                       Prometheus          GET  /                     a page for people

Nothing here talks to a rank: what is accepted goes into `orders`, from where rank 0 takes it.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from fastapi import APIRouter, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, StreamingResponse
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from nanovgen import summary
from nanovgen.asked import Asked, Limits, decode_reference, save_image, to_request
from nanovgen.gauges import Metrics
from nanovgen.guard import Guard
from nanovgen.orders import Full, Order, Orders
from nanovgen.ranks import Ranks

LOOK, KEEP = 0.05, 15.0  # seconds: between two looks at an order that is followed, and of silence on its stream


@dataclass
class Desk:
    """What the routes need. `health` is "ok", or why no video can be made now."""

    orders: Orders
    ranks: Ranks | None
    metrics: Metrics
    limits: Limits
    health: str = "loading"


class Refused(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, message: str, param: str | None = None, headers: dict | None = None):
        super().__init__(message)
        self.status, self.param, self.headers = status, param, headers


routes = APIRouter()


def make_app(desk: Desk, host: str, token: str | None) -> FastAPI:
    app = FastAPI(title="nanovgen", openapi_url=None)
    app.state.desk = desk
    app.include_router(routes)
    app.add_middleware(Guard, host=host, token=token, body=desk.limits.body)
    app.exception_handler(Refused)(lambda _, e: problem(e.status, str(e), e.param, e.headers))
    app.exception_handler(HTTPException)(lambda _, e: problem(e.status_code, str(e.detail), None, e.headers))
    app.exception_handler(RequestValidationError)(lambda _, e: problem(422, *first_fault(e.errors())))
    app.exception_handler(Exception)(lambda _, e: problem(500, f"{type(e).__name__} in the server"))
    return app


def problem(status: int, message: str, param: str | None = None, headers: dict | None = None) -> JSONResponse:
    """OpenAI's shape of an error."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    error = {"message": message, "type": kind, "param": param, "code": str(status)}
    return JSONResponse({"error": error}, status, headers)


def first_fault(errors: list[dict]) -> tuple[str, str]:
    """Message and field of the first thing wrong with a body or a query."""
    where = ".".join(str(part) for part in errors[0]["loc"] if part not in ("query", "body"))
    return f"{where}: {errors[0]['msg']}".lstrip(": "), where


def describe(order: Order) -> dict:
    """OpenAI's video, and what we know beyond it."""
    r = order.request
    error = order.error and {"code": "generation_failed", "message": order.error}
    figures = order.report or {"stages": {}, "seconds": None, "bytes_sent": {}}
    return {
        "id": order.id, "object": "video", "model": r.model, "status": order.status, "progress": order.progress,
        "created_at": int(order.created), "completed_at": order.completed and int(order.completed), "expires_at": None,
        "prompt": r.prompt, "size": r.size, "seconds": f"{r.frames / r.fps:.4g}", "error": error, "remixed_from_video_id": None,
        "num_frames": r.frames, "fps": r.fps, "num_inference_steps": r.steps, "guidance_scale": r.guidance,
        "guidance_scale_2": r.guidance_low, "negative_prompt": r.negative_prompt, "seed": r.seed, "stage": order.stage,
        "step": order.step, "plan": order.plan, "bytes_sent": figures["bytes_sent"], "generation_seconds": figures["seconds"],
        "stage_seconds": {name: row["seconds"] for name, row in figures["stages"].items()},
    }  # fmt: skip


def timing(order: Order) -> dict[str, str]:
    """The Server-Timing header, in milliseconds: waiting, then the stages."""
    if order.report is None:
        return {}
    seconds = {"queued": order.started - order.created}
    seconds |= {name: row["seconds"] for name, row in order.report["stages"].items()} | {"total": order.report["seconds"]}
    return {"Server-Timing": ", ".join(f"{name};dur={1000 * s:.1f}" for name, s in seconds.items())}


def desk_of(request: Request) -> Desk:
    return request.app.state.desk


def order_of(request: Request, name: str) -> Order:
    if (order := desk_of(request).orders.find(name)) is None:
        raise Refused(404, "there is no video of this id", "video_id")
    return order


async def read_body(request: Request) -> tuple[Asked, bytes | None]:
    """The request and the image in it, from JSON or a form."""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind not in ("application/json", "multipart/form-data", "application/x-www-form-urlencoded"):
        raise Refused(415, "send JSON, or a form as OpenAI's clients do")
    try:
        if kind == "application/json":
            asked, image = Asked.model_validate_json(await request.body()), None
        else:
            async with request.form(max_files=1, max_fields=32) as form:
                given = dict(form)
                if len(given) < len(form.multi_items()):
                    raise Refused(422, "a field is given twice")
                upload = given.get("input_reference")
                image = None if upload is None or isinstance(upload, str) else await upload.read()
                fields = {name: value for name, value in given.items() if isinstance(value, str)}
                if files := sorted(given.keys() - fields.keys() - {"input_reference"}):
                    raise Refused(422, f"{files[0]} is no file", files[0])
            if url := fields.pop("input_reference[image_url]", None):
                fields["input_reference"] = {"image_url": url}
            asked = Asked.model_validate(fields)
    except ValidationError as error:
        malformed = error.errors()[0]["type"] == "json_invalid"
        raise Refused(400 if malformed else 422, *first_fault(error.errors(include_url=False, include_context=False))) from None
    return asked, image


def accept(desk: Desk, asked: Asked, image: bytes | None) -> Order:
    """Refuse, by the functions that a run is refused by, or let it wait."""
    name = desk.orders.new_id()
    path = desk.orders.image(name)
    try:
        request = to_request(asked, desk.ranks.base.request, desk.limits, desk.orders.out(name))
        if image is None and asked.input_reference is not None:
            image = decode_reference(asked.input_reference)
        if image is not None:
            save_image(image, path)
            request = replace(request, image=str(path))
        job = desk.ranks.prepare(request)
        return desk.orders.add(name, job.request, summary.describe(job))
    except BaseException:
        path.unlink(missing_ok=True)
        raise


async def enter(request: Request) -> Order:
    """From a body to an order that waits."""
    desk = desk_of(request)
    try:
        if desk.health != "ok":
            raise Refused(503, f"no video can be made now: {desk.health}", headers={"Retry-After": "5"})
        asked, image = await read_body(request)
        desk.orders.check_room()
        return await run_in_threadpool(accept, desk, asked, image)
    except Full as error:
        raise Refused(429, str(error), headers={"Retry-After": "2"}) from None
    except ValueError as error:
        desk.metrics.ends.labels("refused").inc()
        raise Refused(422, str(error)) from None
    except OSError as error:
        raise Refused(507, f"the server cannot write: {error}") from None


@routes.get("/health")
async def health(request: Request) -> JSONResponse:
    desk = desk_of(request)
    body = {"status": desk.health, "waiting": len(desk.orders.waiting)}
    if desk.ranks is not None:
        r = desk.ranks.base.request
        body |= {"model": r.model, "size": r.size, "num_frames": r.frames, "fps": r.fps, "num_inference_steps": r.steps}
    return JSONResponse(body, 200 if desk.health == "ok" else 503)


@routes.get("/", response_class=HTMLResponse)
async def page() -> HTMLResponse:
    own = ("default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src blob:; media-src blob:; "
           "connect-src 'self'")  # fmt: skip
    return HTMLResponse(Path(__file__).with_name("serve.html").read_text(), headers={"Content-Security-Policy": own})


@routes.get("/metrics")
async def metrics(request: Request) -> Response:
    return Response(desk_of(request).metrics.text(), media_type="text/plain; version=0.0.4")


@routes.post("/v1/videos", status_code=202)
async def create(request: Request) -> JSONResponse:
    return JSONResponse(describe(await enter(request)), 202)


@routes.post("/v1/videos/sync")
async def create_and_wait(request: Request) -> Response:
    """The MP4 itself. A client that goes away takes its order along."""
    order = await enter(request)
    while not order.ended:
        await asyncio.sleep(LOOK)
        if await request.is_disconnected():
            desk_of(request).orders.delete(order.id)
            return Response(status_code=204)
    if order.status == "failed":
        raise Refused(500, order.error)
    return video_file(request, order)


@routes.get("/v1/videos")
async def listing(
    request: Request,
    after: Annotated[str | None, Query(max_length=64)] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> JSONResponse:
    found, more = desk_of(request).orders.page(after, limit, order == "desc")
    ends = {"first_id": found[0].id, "last_id": found[-1].id} if found else {"first_id": None, "last_id": None}
    return JSONResponse({"object": "list", "data": [describe(one) for one in found], "has_more": more, **ends})


@routes.get("/v1/videos/{name}")
async def retrieve(request: Request, name: str) -> JSONResponse:
    order = order_of(request, name)
    return JSONResponse(describe(order), headers=timing(order))


@routes.delete("/v1/videos/{name}")
async def delete(request: Request, name: str) -> JSONResponse:
    order = order_of(request, name)
    return JSONResponse({"id": order.id, "object": "video.deleted", "deleted": desk_of(request).orders.delete(order.id)})


@routes.get("/v1/videos/{name}/content")
async def content(request: Request, name: str, variant: Literal["video", "spritesheet"] = "video") -> Response:
    order = order_of(request, name)
    if order.status != "completed":
        raise Refused(409, f"the video is {order.status.replace('_', ' ')}" + (f": {order.error}" if order.error else ""))
    return video_file(request, order, variant)


def video_file(request: Request, order: Order, variant: str = "video") -> Response:
    """Paths are made of the id that the server gave, not of what was asked for."""
    path = desk_of(request).orders.out(order.id)
    path = path if variant == "video" else path.with_suffix(".png")
    if not path.exists():
        raise Refused(404, "the server was started without --sheet" if variant != "video" else "its file is gone from the server")
    kind = "video/mp4" if variant == "video" else "image/png"
    return FileResponse(path, media_type=kind, filename=path.name, headers=timing(order))


@routes.get("/v1/videos/{name}/preview")
async def preview(request: Request, name: str) -> Response:
    picture = order_of(request, name).preview
    if picture is None:
        raise Refused(404, "there is no preview: the video is not being denoised now")
    return Response(picture, media_type="image/jpeg", headers={"Cache-Control": "no-store"})


@routes.get("/v1/videos/{name}/events")
async def events(request: Request, name: str) -> StreamingResponse:
    told = follow(order_of(request, name))
    return StreamingResponse(told, media_type="text/event-stream", headers={"Cache-Control": "no-store"})


async def follow(order: Order) -> AsyncIterator[str]:
    """Everything it told so far, then what it tells, to its end."""
    said, silent = 0, 0.0
    while True:
        news = order.events[said:]
        for event in news:
            yield f"data: {json.dumps(event)}\n\n"
        if news and news[-1]["status"] in ("completed", "failed"):
            return
        said, silent = said + len(news), 0.0 if news else silent + LOOK
        if silent > KEEP:
            silent = 0.0
            yield ": still here\n\n"
        await asyncio.sleep(LOOK)
