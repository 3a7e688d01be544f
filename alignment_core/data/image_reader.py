"""Images that rows name, read once: paths, addresses, ``data:`` URLs and bytes, each checked and kept by its digest."""

from __future__ import annotations

import base64
import errno
import hashlib
import io
import stat
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

from alignment_core.artifacts.os_errors import explained
from alignment_core.data.images import FOLDER, digest_in
from alignment_core.errors import EnvironmentFault, UserError, first_line
from alignment_core.recipes.paths import SCHEMES, is_address

MOST_BYTES = 64 << 20
MOST_PIXELS = 64_000_000
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats of ``PIL`` that are read: others run programs (EPS) or are no pictures for models."""
NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EACCES, errno.EPERM)
"""Errors of a path that names no file that this user can read. All others are faults of the machine."""

RowImages = Callable[[Any, str], str]
"""Reads an image of one row, given as the row names it, and the name of its field; returns the hex digits of its digest.
Raises ValueError for an image that cannot be used, and EnvironmentFault, Unavailable or StoreError where this machine fails."""


class ImageReader:
    """Keeps the images of a data set in a folder, each once, named by the hex digits of its digest."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.count = 0
        """Images that were read, with those that were read before."""
        self._known: dict[str, str] = {}
        """Digests by path or address."""

    def of_row(self, base: Callable[[], str | None], only_below: bool = False) -> RowImages:
        """The reader of a row whose relative paths begin at ``base``, a folder or the address of one; with ``only_below``, no
        other paths are read, as never of rows at an address."""
        return partial(self._read, base, only_below)

    def _read(self, base: Callable[[], str | None], only_below: bool, image: Any, name: str) -> str:
        self.count += 1
        try:
            return self._digest(image, base, only_below)
        except ValueError as error:
            raise ValueError(f"`{name}` {error}") from None

    def _digest(self, image: Any, base: Callable[[], str | None], only_below: bool) -> str:
        if isinstance(image, Mapping):  # of the feature `Image` of `datasets`
            image = image["bytes"] if image.get("bytes") is not None else image.get("path")
        if isinstance(image, bytes):
            return self._kept(image)
        if not isinstance(image, str) or not image:
            raise ValueError(
                f"is {_kind_of(image)}; a path, an address, a data: URL or the bytes of an image are needed"
            )
        if image.startswith("data:"):
            return self._kept(_of_data_url(image))
        place = _place(image, base, only_below)
        if place not in self._known:
            self._known[place] = self._kept(self._content(place, image))
        return self._known[place]

    def _content(self, place: str, image: str) -> bytes:
        return _at_address(place) if is_address(place) else content_of_file(place, image)

    def _kept(self, encoded: bytes) -> str:
        digest = hashlib.sha256(encoded).hexdigest()
        if not (path := self.folder / digest).exists():
            check_image(encoded)
            with explained("write", path):
                self.folder.mkdir(parents=True, exist_ok=True)
                partial_file = path.with_name(f".{digest}.partial")
                partial_file.write_bytes(encoded)
                partial_file.replace(path)
        return digest


class ImageDigests(ImageReader):
    """Digests alone, of images that are neither checked nor kept; of an image at an address, that of the address."""

    def __init__(self) -> None:
        super().__init__(Path())

    def _content(self, place: str, image: str) -> bytes:
        return place.encode() if is_address(place) else super()._content(place, image)

    def _kept(self, encoded: bytes) -> str:
        return hashlib.sha256(encoded).hexdigest()


def check_image(encoded: bytes) -> None:
    """Raise ValueError for the bytes of an image that is broken, too large, or of an unknown format."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    if len(encoded) > MOST_BYTES:
        raise ValueError(f"has more than {MOST_BYTES >> 20} MiB")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of formats' details, and of sizes, which are checked here
            with Image.open(io.BytesIO(encoded), formats=FORMATS) as image:
                if image.width * image.height > MOST_PIXELS:
                    raise Image.DecompressionBombError
                image.load()
                ImageOps.exif_transpose(image, in_place=True)  # as models read it: broken metadata raise any error
    except UnidentifiedImageError:
        raise ValueError(f"is no image of the formats {', '.join(FORMATS)}") from None
    except Image.DecompressionBombError:
        raise ValueError(f"has more than {MOST_PIXELS // 10**6} million pixels") from None
    except Exception as error:  # each format's decoder raises errors of its own for broken bytes
        if isinstance(error, MemoryError) or getattr(error, "errno", None):
            raise
        raise ValueError(f"is a broken image: {first_line(error)}") from None


def data_url(path: Path) -> str:
    """A file of an image as a ``data:`` URL with its type."""
    from PIL import Image

    with Image.open(path, formats=FORMATS) as image:
        kind = Image.MIME[str(image.format)]
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def _place(image: str, base: Callable[[], str | None], only_below: bool) -> str:
    """The path or address of an image. Raises ValueError for one that these rows may not name: rows that come from elsewhere
    do not decide which files of this machine are read."""
    folder = base()
    if is_address(image):
        if (scheme := image.partition("://")[0]) not in SCHEMES:
            known = ", ".join(f"{name}://" for name in SCHEMES)
            raise ValueError(f"is the address {image!r}: {scheme}:// is not read; addresses begin with one of {known}")
        if "env:" in image:
            raise ValueError(f"is the address {image!r}: addresses in rows cannot name environment variables")
        return image
    if digest := digest_in(image):
        image = f"{FOLDER}/{digest}"
    at_address = folder is not None and is_address(folder)
    if (at_address or only_below) and (image.startswith("/") or ".." in image.split("/")):
        rows = "at an address" if at_address else "of the store"
        raise ValueError(f"is the path {image!r}: rows {rows} name images below their own folder")
    if Path(image).is_absolute():
        if folder is None and not _is_downloaded(Path(image)):
            raise ValueError(f"is the path {image!r}, and these rows are in no folder: give its address or its bytes")
        return image
    if folder is None:
        raise ValueError(f"is the path {image!r}, and these rows are in no folder: give its address or its bytes")
    return f"{folder}/{image}" if at_address else str(Path(folder, image))


def _is_downloaded(path: Path) -> bool:
    """Whether ``datasets`` downloaded a file: it puts the paths of such images into rows."""
    import datasets
    from huggingface_hub import constants

    folders = (datasets.config.HF_DATASETS_CACHE, datasets.config.DOWNLOADED_DATASETS_PATH, constants.HF_HUB_CACHE)
    return any(path.resolve().is_relative_to(Path(folder).resolve()) for folder in folders)


def content_of_file(path: str, named: str) -> bytes:
    """The bytes of a regular file, which a row calls ``named``. Raises ValueError for one that is not there, cannot be read or
    is too large, and EnvironmentFault, Unavailable or StoreError where this machine fails."""
    file = Path(path)
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):
            raise FileNotFoundError(errno.ENOENT, "no regular file")
        if status.st_size > MOST_BYTES:
            raise ValueError(f"is {named!r}: it has more than {MOST_BYTES >> 20} MiB")
        return file.read_bytes()
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM):
            raise ValueError(f"is {named!r}: it cannot be read: {error.strerror}") from None
        if error.errno in NO_FILE:
            raise ValueError(f"is {named!r}: there is no such file ({path})") from None
        with explained("read", file):
            raise


def _at_address(address: str) -> bytes:
    from alignment_core.data.addresses import read_bytes

    try:
        return read_bytes(address, MOST_BYTES + 1)
    except UserError as error:
        raise ValueError(f"is not there: {error}") from None
    except EnvironmentFault as error:
        if address.startswith("http"):  # of this one image, on servers that need no credentials
            raise ValueError(f"cannot be read: {error}") from None
        raise


def _of_data_url(url: str) -> bytes:
    head, comma, content = url.partition(",")
    if not comma:
        raise ValueError("is a data: URL without content")
    if not head.endswith(";base64"):
        return unquote_to_bytes(content)
    try:
        return base64.b64decode(content, validate=True)
    except ValueError as error:
        raise ValueError(f"is a data: URL that is not valid base64: {error}") from None


def _kind_of(value: object) -> str:
    return "null" if value is None else "empty" if value == "" else f"a {type(value).__name__}"
