"""The page at `/`: three files of the package, no build, nothing from the network."""

from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import Response

_TYPES = {
    "index.html": "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
}
# Nothing but the page's own files and this server; no other page may frame it.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self';"
    " form-action 'none'; frame-ancestors 'none'; base-uri 'none'"
)
_HEADERS = {"content-security-policy": _POLICY, "x-content-type-options": "nosniff", "cache-control": "no-cache"}


def page_routes() -> APIRouter:
    """Make the routes of the page."""
    router = APIRouter(include_in_schema=False)
    folder = files("soloist.server") / "page"

    def add(path: str, name: str) -> None:
        content = (folder / name).read_bytes()

        @router.get(path)
        async def page() -> Response:
            return Response(content, media_type=_TYPES[name], headers=_HEADERS)

    add("/", "index.html")
    for name in _TYPES:
        add(f"/{name}", name)
    return router
