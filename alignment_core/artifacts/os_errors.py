"""Operating-system errors as the project's errors: one sentence that says what failed and what to do."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from alignment_core.errors import EnvironmentFault, NotFound, StoreError, Unavailable

_MACHINE = {
    errno.ENOSPC: "the disk is full; free space (for example with the store's gc) or choose another store",
    errno.EDQUOT: "the disk quota is used up; free space or choose another store",
    errno.EFBIG: "the file is larger than this file system or process may write",
    errno.EACCES: "permission denied; give this user read and write access or choose another store",
    errno.EPERM: "not permitted; the store needs a file system with hard links and a user who may write",
    errno.EROFS: "the file system is read-only; choose another store",
    errno.EOPNOTSUPP: "the file system lacks hard links, which the store needs; choose another one",
}
_IMPOSSIBLE = (
    errno.EOPNOTSUPP,
    errno.EXDEV,
    errno.EINVAL,
    errno.ENOTTY,
    errno.ENOSYS,
    errno.EMLINK,
    errno.EPERM,
)
_DISK_FULL = ("No space left on device", "os error 28")
_TRANSIENT = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EBUSY}


def machine_fault(error: BaseException) -> EnvironmentFault | None:
    """The fault of this machine behind an error of a stage, if there is one; libraries wrap such errors as text."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None and any(sign in str(error) for sign in _DISK_FULL):
        number = errno.ENOSPC
    return EnvironmentFault(f"{error}: {_MACHINE[number]}") if number in _MACHINE else None


def possible(work: Callable[[], None]) -> bool:
    """Do work that a file system may not support, such as a hard link; False if it does not."""
    try:
        work()
    except OSError as error:
        if error.errno not in _IMPOSSIBLE:
            raise
        return False
    return True


def check_room(directory: Path, size: int, what: str) -> None:
    """Raise EnvironmentFault if ``size`` bytes do not fit on the disk of ``directory``, before any are written."""
    free = shutil.disk_usage(directory).free
    if size > free:
        needed, left = (f"{number / (1 << 20):.1f} MiB" for number in (size, free))
        raise EnvironmentFault(f"{what} needs {needed} in {directory}, which has {left} left: {_MACHINE[errno.ENOSPC]}")


@contextmanager
def explained(action: str, path: Path) -> Iterator[None]:
    """Raise an OSError of the block as NotFound, EnvironmentFault, Unavailable or StoreError."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFound(f"cannot {action} {path}: there is no {error.filename or path}") from error
    except OSError as error:
        sentence = f"cannot {action} {path}: "
        if error.errno in _MACHINE:
            raise EnvironmentFault(sentence + _MACHINE[error.errno]) from error
        if error.errno in _TRANSIENT:
            raise Unavailable(f"{sentence}{error.strerror}") from error
        raise StoreError(f"{sentence}{error.strerror or error}") from error
