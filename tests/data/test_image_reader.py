"""Images that rows name: which files and addresses rows may name, and faults of the machine, which are none of the rows."""

from __future__ import annotations

import errno
import hashlib
from pathlib import Path

import pytest
from PIL import Image

from alignment_core.data.image_reader import ImageReader, check_image
from alignment_core.errors import EnvironmentFault, StoreError, Unavailable
from tests.conftest import fill
from tests.images import write_images

AT_ADDRESS = "https://example.org/rows"


@pytest.fixture
def image(tmp_path: Path) -> Path:
    return write_images(tmp_path / "pictures")["red"]


def read(image: str, folder: str | None, kept: Path) -> str:
    return ImageReader(kept).of_row(lambda: folder)(image, "image")


@pytest.mark.parametrize("folder", [None, AT_ADDRESS, "."])
@pytest.mark.parametrize("scheme", ["file", "local", "memory", "ftp", "FILE"])
def test_only_addresses_of_object_stores_and_web_servers_are_read(
    image: Path, tmp_path: Path, scheme: str, folder: str | None
) -> None:
    with pytest.raises(ValueError, match=rf"{scheme}:// is not read; addresses begin with one of s3://, gs://"):
        read(f"{scheme}://{image}", folder, tmp_path / "kept")


@pytest.mark.parametrize("folder", [None, AT_ADDRESS])
@pytest.mark.parametrize("form", ["{}", "../{}", "{}/../red.png"])
def test_rows_from_elsewhere_name_no_files_of_this_machine(
    image: Path, tmp_path: Path, folder: str | None, form: str
) -> None:
    with pytest.raises(ValueError, match="is the path"):
        read(form.format(image), folder, tmp_path / "kept")


def test_rows_of_the_hub_name_files_that_datasets_downloaded(
    image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    cache = tmp_path / "cache"
    cache.mkdir()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    downloaded = cache / "red.png"
    downloaded.write_bytes(image.read_bytes())
    assert read(str(downloaded), None, tmp_path / "kept") == hashlib.sha256(image.read_bytes()).hexdigest()
    (cache / "link.png").symlink_to(image)  # as an archive of a repository may contain it
    for path in (cache / "link.png", cache / ".." / "pictures" / "red.png"):
        with pytest.raises(ValueError, match="is the path"):
            read(str(path), None, tmp_path / "kept")


def test_a_full_disk_is_no_fault_of_a_row(image: Path, small_disk: Path) -> None:
    fill(small_disk)
    with pytest.raises(EnvironmentFault, match="the disk is full"):
        read(str(image), ".", small_disk / "kept")


@pytest.mark.parametrize(
    ("number", "fault"), [(errno.ENOSPC, EnvironmentFault), (errno.EMFILE, StoreError), (errno.EIO, Unavailable)]
)
@pytest.mark.parametrize("method", ["read_bytes", "write_bytes"])
def test_faults_of_the_machine_do_not_make_rows_malformed(
    image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, number: int, fault: type[Exception]
) -> None:
    def failing(*_: object) -> None:
        raise OSError(number, "of the machine")

    monkeypatch.setattr(Path, method, failing)  # no file system has such faults on demand
    with pytest.raises(fault):
        read(str(image), ".", tmp_path / "kept")


@pytest.mark.parametrize("name", ["none.png", "red.png/none.png", "x" * 300, ".", "a\0b"])
def test_a_path_without_a_file_makes_its_row_malformed(image: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="`image` "):
        read(name, str(image.parent), tmp_path / "kept")


@pytest.mark.parametrize("suffix", ["PNG", "WEBP"])
def test_broken_metadata_makes_a_broken_image(tmp_path: Path, suffix: str) -> None:
    """`transformers` gets the picture upright, so its orientation has to be readable."""
    file = tmp_path / "picture"
    Image.new("RGB", (28, 28)).save(file, suffix, exif=b"Exif\0\0garbage!")
    with pytest.raises(ValueError, match="is a broken image"):
        check_image(file.read_bytes())
