"""The web application of the studio: its routes. FastAPI is imported when an application is created."""

import json
import re
import struct
import tempfile
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from regard import __version__
from regard.studio.limits import LIMITS, Limits, RefusedError, within
from regard.studio.playground import Question, Sentence
from regard.studio.prediction_api import Asked, Asks, add_examples, answer, saved_run_at
from regard.studio.request_guard import Guard
from regard.studio.trace_store import StoredTrace, TraceStore
from regard.studio.translation_api import Ask, Judge, Scores, Translates, judge, translate, translators

if TYPE_CHECKING:
    from fastapi import FastAPI, Request, Response

    from regard.look.attention_records import Record
    from regard.look.faithfulness import Curve, Faithfulness
    from regard.look.trace import Trace
    from regard.studio.metric_curves import Curves

TYPES = {"js": "text/javascript", "css": "text/css", "html": "text/html", "svg": "image/svg+xml"}
FOLDERS = {"static": ("regard.studio", "static"), "page": ("regard.look.viewer", "assets")}
Body = TypeVar("Body", bound=BaseModel)


def create(
    runs: Sequence[Translates | Asks] = (),
    traces: "Sequence[Trace | Path]" = (),
    *,
    host: str = "127.0.0.1",
    port: int = 7788,
    limits: Limits = LIMITS,
) -> "FastAPI":
    """Return the application over runs and traces; it only serves requests to `host` and `port`.

    >>> create(port=7788).title
    'regard studio'
    """
    from fastapi import FastAPI, HTTPException

    app = FastAPI(title="regard studio", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.add_middleware(Guard, host=host, port=port, limits=limits)
    app.add_exception_handler(RefusedError, _refused)
    app.add_exception_handler(HTTPException, _missing)
    app.add_exception_handler(404, _missing)
    app.add_exception_handler(405, _missing)
    _add_files(app)
    store = TraceStore(traces, limits)
    add_examples(runs, store)
    _add_traces(app, store)
    _add_pictures(app, store)
    _add_live(app, list(runs))
    _add_runs(app, list(runs), store, limits)
    return app


def _add_files(app: "FastAPI") -> None:
    """Add the routes of the page, its scripts and styles."""
    from fastapi import Response

    def file(folder: str, name: str) -> Response:
        package, place = FOLDERS[folder]
        # Only a plain file name is accepted: a name without separators or a leading dot cannot lead out of the folder.
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*\.(js|css|html|svg)", name):
            raise RefusedError(f"there is no file {name[:60]!r}", 404)
        asset = files(package) / place / name
        if not asset.is_file():
            raise RefusedError(f"there is no file {name!r}", 404)
        kind = TYPES[name.rpartition(".")[2]]
        return Response(asset.read_bytes(), media_type=f"{kind}; charset=utf-8", headers={"cache-control": "no-cache"})

    @app.get("/")
    def index() -> Response:
        return file("static", "index.html")

    @app.get("/static/{name}")
    def static(name: str) -> Response:
        return file("static", name)

    @app.get("/page/{name}")
    def page(name: str) -> Response:
        return file("page", name)


def _add_traces(app: "FastAPI", store: TraceStore) -> None:
    """Add the routes of the list of traces, and of uploads."""
    from fastapi import Request
    from fastapi.concurrency import run_in_threadpool

    @app.get("/api/traces")
    def traces() -> dict[str, Any]:
        return {"traces": [_listed(entry) for entry in store.list()]}

    @app.post("/api/traces")
    async def hand_in(request: Request) -> dict[str, Any]:
        if request.headers.get("content-type") != "application/octet-stream":
            raise RefusedError("a trace file must come as application/octet-stream", 415)
        with tempfile.TemporaryDirectory(prefix="regard-") as folder:
            path = Path(folder) / "handed-in.trace"
            with path.open("wb") as target:
                async for chunk in request.stream():
                    target.write(chunk)
            entry = await run_in_threadpool(store.hand_in, path)
        return _listed(entry)

    @app.delete("/api/traces/{id}")
    def remove(id: str) -> dict[str, Any]:
        store.remove(id)
        return {"removed": id}

    @app.get("/api/traces/{id}/records")
    def records(id: str, request: Request) -> dict[str, Any]:
        from regard.studio.trace_descriptions import described

        return described(store[id], *_numbers(request, "batch"))

    @app.get("/api/traces/{id}/picture")
    def picture(id: str, label: str, request: Request) -> "Response":
        from fastapi import Response

        from regard.look.viewer.page_data import pictures

        [batch] = _numbers(request, "batch")
        trace = store[id].shown
        within(batch, 0, max(0, trace.sequences - 1), "batch")
        data = pictures(trace, batch=batch).get(label)
        if data is None:
            raise RefusedError(f"label {label[:20]!r} has no picture", 404)
        width, height = _png_size(data)
        if width * height > LIMITS.pixels:
            raise RefusedError(f"a picture must have at most {LIMITS.pixels} pixels, got {width} × {height}", 413)
        return Response(data, media_type="image/png")

    @app.get("/api/traces/{id}/faithfulness")
    def faithful(id: str, request: Request) -> dict[str, Any]:
        record, head, row = _numbers(request, "record", "head", "row")
        return _curves(store[id].faithfulness(record, head, row))


def _add_pictures(app: "FastAPI", store: TraceStore) -> None:
    """Add the routes that return parts of attention maps as bytes. The header x-regard-grid describes the bytes."""
    from fastapi import Request, Response

    def record_of(id: str, number: int) -> "Record":
        seen = store[id].shown.records
        return seen[within(number, 0, len(seen) - 1, "record")]

    def sent(grid: Any, type: str) -> Response:
        body, about = grid.packed(type)
        return Response(body, media_type="application/octet-stream", headers={"x-regard-grid": about})

    def floats(values: Any) -> Response:
        return Response(values.contiguous().numpy().tobytes(), media_type="application/octet-stream")

    @app.get("/api/traces/{id}/thumbnail")
    def thumbnail(id: str, request: Request) -> Response:
        from regard.studio import map_tiles

        record, head, batch = _numbers(request, "record", "head", "batch")
        return sent(map_tiles.thumbnail(record_of(id, record), head, batch), "uint8")

    @app.get("/api/traces/{id}/map")
    def whole(id: str, request: Request) -> Response:
        from regard.studio import map_tiles

        record, head, batch = _numbers(request, "record", "head", "batch")
        return sent(map_tiles.whole(record_of(id, record), head, batch), "float16")

    @app.get("/api/traces/{id}/tile")
    def tile(id: str, request: Request) -> Response:
        from regard.studio import map_tiles

        record, head, batch, *part = _numbers(request, "record", "head", "batch", "row", "column", "rows", "columns")
        row, column, rows, columns = part
        return sent(map_tiles.tile(record_of(id, record), head, row, column, rows, columns, batch), "float16")

    @app.get("/api/traces/{id}/rows")
    def rows(id: str, request: Request) -> Response:
        from regard.studio import map_tiles

        record, head, batch, row = _numbers(request, "record", "head", "batch", "row")
        return floats(map_tiles.row(record_of(id, record), head, row, batch))

    @app.get("/api/traces/{id}/received")
    def received(id: str, request: Request) -> Response:
        from regard.studio import map_tiles

        record, head, batch = _numbers(request, "record", "head", "batch")
        return floats(map_tiles.received(record_of(id, record), head, batch))


def _add_runs(app: "FastAPI", runs: list[Translates | Asks], store: TraceStore, limits: Limits) -> None:
    """Add the routes of runs of any task: their pages, their curves, and their answers."""
    from fastapi import Request, Response
    from fastapi.concurrency import run_in_threadpool

    curves: dict[int, Curves] = {}

    @app.post("/api/ask")
    async def answered(request: Request) -> dict[str, Any]:
        question = await _body(request, Asked)
        return await run_in_threadpool(answer, runs, question, store, limits)

    @app.get("/api/runs/{number}")
    def page(number: str) -> dict[str, Any]:
        from regard.studio.run_page import details

        return details(saved_run_at(runs, _whole(number, "run")))

    @app.get("/api/runs/{number}/example/{name}")
    def begun(number: str, name: str) -> Response:
        from regard.studio.run_page import example_bytes

        data, kind = example_bytes(saved_run_at(runs, _whole(number, "run")), name)
        return Response(data, media_type=kind)

    @app.get("/api/runs/{number}/curves")
    def curves_of_run(number: str) -> dict[str, Any]:
        from regard.studio.metric_curves import Curves

        place = _whole(number, "run")
        run = saved_run_at(runs, place)
        return curves.setdefault(place, Curves(run.run.metrics.path, limits)).read()


def _add_live(app: "FastAPI", runs: list[Translates | Asks]) -> None:
    """Add the routes of computations: the playground, and translations."""
    from fastapi import Request
    from fastapi.concurrency import run_in_threadpool

    toys: list[Translates] = []

    def available() -> list[Translates | None]:
        """Return the translator of each run, None for a run without one; add toy translators if no run has one."""
        offered = translators(runs)
        if not any(offered) and not toys:  # with toy translators, the translation page works before any run is trained
            from regard.studio import toy_translator

            toys.extend(toy_translator.toys())
        return [*offered, *toys]

    @app.get("/api/status")
    def status() -> dict[str, Any]:
        bounds = {"vectors": LIMITS.vectors, "size": LIMITS.size, "text": LIMITS.text, "beams": LIMITS.beams}
        return {"version": __version__, "runs": len(runs), "limits": bounds}

    @app.get("/api/runs")
    def listed() -> dict[str, Any]:
        from regard.studio.run_page import summary

        entries: list[dict[str, Any]] = []
        for place, translator in enumerate(available()):
            run = runs[place] if place < len(runs) else None
            known = summary(run) if isinstance(run, Asks) else {"name": translator.name if translator else ""}
            can = {"translates": translator is not None, "scores": isinstance(translator, Scores)}
            entries.append({**known, **can})
        return {"runs": entries, "toys": bool(toys)}

    @app.post("/api/translate")
    async def translated(request: Request) -> dict[str, Any]:
        ask = await _body(request, Ask)
        return await run_in_threadpool(lambda: translate(available(), ask))

    @app.post("/api/faithfulness")
    async def judged(request: Request) -> dict[str, Any]:
        question = await _body(request, Judge)
        return await run_in_threadpool(lambda: _curves(judge(available(), question)))

    @app.post("/api/playground")
    async def playground(request: Request) -> dict[str, Any]:
        from regard.studio.playground import answer

        return await run_in_threadpool(answer, await _body(request, Question))

    @app.post("/api/sentence")
    async def sentence(request: Request) -> dict[str, Any]:
        from regard.studio.playground import embed

        return embed(await _body(request, Sentence))


async def _body(request: "Request", model: type[Body]) -> Body:
    """Return the validated body of a request, or raise a `RefusedError` that states what is wrong."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise RefusedError("the body must be application/json", 415)
    try:
        return model.model_validate_json(await request.body())
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "the body"
        got = "" if first["type"] == "json_invalid" else f", got {str(first['input'])[:60]!r}"
        raise RefusedError(f"{place}: {first['msg']}{got}") from None


def _numbers(request: "Request", *names: str) -> list[int]:
    """Return the integers in a URL's query string that have the given names; the integer of a missing name is 0."""
    return [_whole(request.query_params.get(name, "0"), name) for name in names]


def _whole(text: str, name: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise RefusedError(f"{name} must be a whole number of at most 9 digits, got {text[:20]!r}")
    return int(text)


def _png_size(data: bytes) -> tuple[int, int]:
    """Return width and height from the header of a PNG file, by which a browser allocates memory."""
    if len(data) < 24 or not data.startswith(b"\x89PNG\r\n\x1a\n") or data[12:16] != b"IHDR":
        raise RefusedError("a picture of a trace must be a PNG file")
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def _listed(entry: StoredTrace) -> dict[str, Any]:
    return {"id": entry.id, "title": entry.title, "origin": entry.origin}


def _curves(faithfulness: "Faithfulness") -> dict[str, Any]:
    return {
        "deletion": {name: _curve(curve) for name, curve in faithfulness.deletion.items()},
        "sufficiency": {name: _curve(curve) for name, curve in faithfulness.sufficiency.items()},
        "gain": {name: faithfulness.gain(name) for name in faithfulness.deletion if name != "map"},
    }


def _curve(curve: "Curve") -> dict[str, Any]:
    return {
        "fractions": curve.fractions, "scores": curve.scores, "low": curve.low, "high": curve.high, "area": curve.area,
    }  # fmt: skip


def _refused(request: "Request", error: Exception) -> "Response":
    status = error.status if isinstance(error, RefusedError) else 400
    return _error(status, str(error))


def _missing(request: "Request", error: Exception) -> "Response":
    status = int(getattr(error, "status_code", 404))
    what = "there is nothing at this address" if status == 404 else str(getattr(error, "detail", "refused"))
    return _error(status, what)


def _error(status: int, message: str) -> "Response":
    from fastapi import Response

    return Response(json.dumps({"error": message}), status, media_type="application/json")
