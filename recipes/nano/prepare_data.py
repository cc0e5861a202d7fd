"""Makes the corpus of soloist-nano: Python sources under permissive licences, cleaned, without near-duplicates, split.

The sources are the standard library of the Python that runs this and the packages that `packages.toml` pins, from where
they are installed or else from their wheels; what is written beside the documents is a manifest with each source's
version, licence and SHA-256.
"""

import argparse
import ast
import csv
import email
import gzip
import hashlib
import json
import re
import subprocess
import sys
import sysconfig
import tomllib
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).parent
# Licences whose text may be used with no condition but naming its authors.
PERMISSIVE = re.compile(
    r"\b(MIT(-CMU)?|BSD|[0-23]-Clause|0BSD|Apache|ISC|PSF|Python Software Foundation|Unlicense|Zlib|HPND)\b",
    re.IGNORECASE,
)
RESTRICTED = re.compile(r"\b(L?A?GPL|GNU|MPL|Mozilla|EPL|CDDL|proprietary|CC-BY-NC)", re.IGNORECASE)
# Parts of paths: other people's code, generated code, data, and tests, which repeat themselves.
SKIPPED = re.compile(
    r"(^|/)(_?vendor(ed)?|_vendored_\w+|third_?party|extern(al|als)?|tests?|testing|\w*_tests?|test_\w*|conftest|"
    r"migrations|locales?|_pb2|\w*_pb2\w*|lib2to3|idlelib|turtledemo|generated|_generated|node_modules)(/|\.py$|$)"
)
GENERATED = re.compile(r"auto-?generated|do not edit|generated (by|from|with)|machine generated", re.IGNORECASE)
# Lines that hold data and no code.
LITERAL = re.compile(r"""^\s*([\[\](){},'"0-9-]|[rbuf]['"]).*[,\])}]$""")
MIN_BYTES, MAX_BYTES = 300, 60_000
# What compresses below this share says the same thing over and over.
MIN_COMPRESSED = 0.13
MAX_DOCSTRING_LINES = 6
# One standard module in this many is held out.
HELD_OUT_EVERY = 12
# Shingles of this many lines; a quarter of them, chosen by hash, is remembered.
SHINGLE_LINES, SHINGLE_SAMPLE = 3, 4
# Most shared shingles of a document with all before it, and with the held-out documents.
MAX_SHARED, MAX_SHARED_WITH_HELD_OUT = 0.5, 0.1


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where documents come from, as the manifest tells it."""

    name: str
    version: str
    licence: str
    # Of the rows for .py files in the RECORD, sorted, which wheel and installation share; of the standard library, of
    # its files.
    sha256: str
    is_held_out: bool


@dataclass(frozen=True, kw_only=True)
class Document:
    """One cleaned file."""

    source: str
    path: str
    text: str
    is_held_out: bool


def licence_of(metadata: str) -> str | None:
    """Give the licence that a wheel's METADATA states; None if it is not clearly a permissive one."""
    message = email.message_from_string(metadata)
    expression = message["License-Expression"]
    classifiers = [c for c in message.get_all("Classifier", []) if c.startswith("License ::")]
    short = (message["License"] or "").strip().partition("\n")[0][:80]
    stated = expression or "; ".join(c.rpartition(":: ")[2] for c in classifiers) or short
    if classifiers and not expression and short:
        stated = stated if PERMISSIVE.search(stated) else f"{stated}; {short}"
    return stated if PERMISSIVE.search(stated) and not RESTRICTED.search(stated) else None


def shorten_docstrings(lines: list[str], tree: ast.Module) -> list[str]:
    """Cut docstrings of more than a few lines down to their first paragraph."""
    lines = list(lines)
    nodes = [n for n in ast.walk(tree) if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef)]
    spans = []
    for node in nodes:
        first = node.body[0] if node.body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            spans.append((first.lineno - 1, first.end_lineno - 1))
    for start, end in sorted(spans, reverse=True):
        if end - start < MAX_DOCSTRING_LINES:
            continue
        opening = re.match(r"\s*[rRuU]?(\"\"\"|''')", lines[start])
        if opening is None or not lines[end].rstrip().endswith(opening[1]):
            continue
        blank = next((i for i in range(start + 1, end) if not lines[i].strip()), None)
        head = lines[start:blank] if blank else []
        if 0 < len(head) < MAX_DOCSTRING_LINES and head[-1].strip(" rRuU") != opening[1]:
            lines[start : end + 1] = [*head[:-1], head[-1] + opening[1]]
    return lines


def clean(raw: bytes) -> str | None:
    """Give a file as the corpus holds it, or None if it is no code, or data, or not of a useful size."""
    if not MIN_BYTES <= len(raw) <= 4 * MAX_BYTES:
        return None
    try:
        text = raw.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return None
    lines = text.split("\n")
    is_code = (
        "\t" not in text
        and max(map(len, lines)) <= 200
        and sum(not line.isascii() for line in lines) <= len(lines) / 50
        and sum(bool(LITERAL.match(line)) for line in lines) <= len(lines) / 3
        and not GENERATED.search(text[:2000])
    )
    if not is_code:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            lines = shorten_docstrings(lines, ast.parse(text))
            # A file begins with what it does, not with whose it is.
            while lines and (lines[0].startswith("#") or not lines[0].strip()):
                lines.pop(0)
            text = re.sub(r"\n{4,}", "\n\n\n", "\n".join(line.rstrip() for line in lines)).strip("\n") + "\n"
            ast.parse(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    data = text.encode()
    is_useful = MIN_BYTES <= len(data) <= MAX_BYTES and len(zlib.compress(data, 6)) >= MIN_COMPRESSED * len(data)
    return text if is_useful else None


def shingles(text: str) -> set[int]:
    """Hash all runs of a few lines, white space and blank lines aside, and keep a fixed share of the hashes."""
    lines = [line.strip() for line in text.split("\n") if len(line.strip()) > 2]
    runs = ("\n".join(lines[i : i + SHINGLE_LINES]) for i in range(max(len(lines) - SHINGLE_LINES + 1, 1)))
    hashes = (int.from_bytes(hashlib.blake2b(run.encode(), digest_size=8).digest()) for run in runs)
    return {value for value in hashes if value % SHINGLE_SAMPLE == 0}


class Deduplicator:
    """Says which documents are mostly made of what was seen before; held-out documents come first."""

    def __init__(self) -> None:
        self._held_out: set[int] = set()
        self._seen: set[int] = set()

    def is_new(self, document: Document) -> bool:
        """Say whether a document shares little with the others so far, and remember it if so."""
        own = shingles(document.text)
        with_held_out = len(own & self._held_out)
        if with_held_out > MAX_SHARED * len(own) or len(own & self._seen) > MAX_SHARED * len(own):
            return False
        if not document.is_held_out and with_held_out > MAX_SHARED_WITH_HELD_OUT * len(own):
            return False
        (self._held_out if document.is_held_out else self._seen).update(own)
        return True


def standard_library() -> Iterator[tuple[Source, Iterator[Document]]]:
    """Give the standard library of this Python as two sources; the hash of its name decides where a module goes."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(p for p in root.rglob("*.py") if "site-packages" not in p.parts)
    files = [p for p in files if not SKIPPED.search(p.relative_to(root).as_posix())]

    def is_held_out(path: Path) -> bool:
        module = path.relative_to(root).parts[0].removesuffix(".py")
        return hashlib.sha256(module.encode()).digest()[0] % HELD_OUT_EVERY == 0

    for held_out, name in ((True, "cpython-held-out"), (False, "cpython")):
        own = [p for p in files if is_held_out(p) == held_out]
        source = Source(
            name=name,
            version=sys.version.split()[0],
            licence="PSF-2.0",
            sha256=hashlib.sha256(b"".join(p.read_bytes() for p in own)).hexdigest(),
            is_held_out=held_out,
        )
        yield source, read_documents(source, ((p.relative_to(root).as_posix(), p.read_bytes()) for p in own))


def read_documents(source: Source, files: Iterable[tuple[str, bytes]]) -> Iterator[Document]:
    """Clean files (path, content), leaving out those that are no use."""
    for path, raw in files:
        if (text := clean(raw)) is not None:
            yield Document(source=source.name, path=path, text=text, is_held_out=source.is_held_out)


def package(
    name: str, read: Callable[[str], bytes], dist_info: str, is_held_out: bool
) -> tuple[Source, Iterator[Document]] | None:
    """Give a package's sources; None if its licence is not clearly permissive.

    Args:
        name: normalised.
        read: gives a file's content by its path within the package.
        dist_info: path of its metadata.
        is_held_out: whether it is measured on.
    """
    text = read(f"{dist_info}/METADATA").decode("utf-8", "replace")
    licence = licence_of(text)
    if licence is None:
        print(f"left out, licence not clearly permissive: {name}", file=sys.stderr)
        return None
    record = csv.reader(read(f"{dist_info}/RECORD").decode().splitlines())
    rows = sorted((row[0], row[1]) for row in record if row[0].endswith(".py") and not row[0].startswith(("..", "/")))
    source = Source(
        name=name,
        version=email.message_from_string(text)["Version"],
        licence=licence,
        sha256=hashlib.sha256(json.dumps(rows).encode()).hexdigest(),
        is_held_out=is_held_out,
    )
    members = [member for member, _ in rows if not SKIPPED.search(member)]
    return source, read_documents(source, ((member, read(member)) for member in members))


def normalise(name: str) -> str:
    """Give a package's name as indices compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def find_packages(pins: dict[str, str], installed: list[Path], wheels: Path) -> Iterator[tuple[str, Callable, str]]:
    """Find each pinned package, by name its version, where it is installed, or else in its wheel, which is fetched.

    Returns:
        Names, what reads a file of the package, and the path of its metadata.
    """
    found = {}
    for info in [info for folder in installed for info in sorted(folder.glob("*.dist-info"))]:
        name, _, version = info.name.removesuffix(".dist-info").partition("-")
        if pins.get(normalise(name)) == version.partition("+")[0]:
            found[normalise(name)] = (lambda member, folder=info.parent: (folder / member).read_bytes()), info.name
    fetch([f"{name}=={version}" for name, version in pins.items() if name not in found], wheels)
    for path in sorted(wheels.glob("*.whl")):
        name = normalise(path.name.split("-")[0])
        if name in pins and name not in found:
            archive = zipfile.ZipFile(path)
            # A wheel may hold other packages, with theirs.
            (info,) = {n.partition("/")[0] for n in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/RECORD", n)}
            found[name] = archive.read, info
    for name in sorted(found):
        yield name, *found[name]


def fetch(requirements: list[str], folder: Path) -> None:
    """Download the pinned wheels that are not in `folder` yet."""
    have = {normalise(p.name.split("-")[0]) for p in folder.glob("*.whl")}
    missing = [r for r in requirements if r.partition("==")[0] not in have]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "-d", str(folder)]
    for requirement in missing:
        subprocess.run([*command, requirement], check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    """Fetch, clean, compare, split, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wheels", type=Path, required=True, help="folder for the downloaded wheels")
    parser.add_argument("--installed", type=Path, nargs="*", default=[], help="site-packages to look in first")
    parser.add_argument("--out", type=Path, required=True, help="gets train.jsonl.gz, held_out.jsonl.gz, manifest.json")
    parser.add_argument("--only", nargs="*", help="names of packages to take instead of all")
    args = parser.parse_args()
    packages = tomllib.loads((HERE / "packages.toml").read_text())
    pins = dict(r.split("==") for r in packages["train"] + packages["held_out"])
    if args.only is not None:
        pins = {name: pins[name] for name in args.only}
    args.wheels.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    held_out = {r.partition("==")[0] for r in packages["held_out"]}
    found = list(standard_library())
    for name, read, dist_info in find_packages(pins, args.installed, args.wheels):
        if (taken := package(name, read, dist_info, name in held_out)) is not None:
            found.append(taken)
    # Held-out documents first, so that those for training are compared with them.
    found.sort(key=lambda pair: not pair[0].is_held_out)
    deduplicator = Deduplicator()
    counts = {source.name: {"documents": 0, "bytes": 0, "duplicates": 0} for source, _ in found}
    with (
        gzip.open(args.out / "train.jsonl.gz", "wt", compresslevel=3) as train,
        gzip.open(args.out / "held_out.jsonl.gz", "wt", compresslevel=3) as held,
    ):
        for source, documents in found:
            for document in documents:
                count = counts[source.name]
                if not deduplicator.is_new(document):
                    count["duplicates"] += 1
                    continue
                count["documents"] += 1
                count["bytes"] += len(document.text.encode())
                print(json.dumps(asdict(document)), file=held if document.is_held_out else train)
    manifest = [asdict(source) | counts[source.name] for source, _ in found]
    (args.out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    print(f"{sum(c['documents'] for c in counts.values())} documents, {sum(c['bytes'] for c in counts.values())} bytes")


if __name__ == "__main__":
    main()
