"""Where ranks meet under torchrun: the store of torch.distributed. Loaded for that alone."""

from __future__ import annotations

from gpurt.errors import ConfigError
from gpurt.process_group import Store


def open_store() -> Store:
    """The store that MASTER_ADDR and MASTER_PORT name. Raises: ConfigError without torch or if it
    cannot be reached.
    """
    hint = "start with torchrun, or set GPURT_RENDEZVOUS to an empty folder"
    try:
        from torch.distributed import rendezvous
    except ImportError as error:
        msg = f"torch is not installed ({error})"
        raise ConfigError(f"{msg} - at MASTER_ADDR - {hint}") from error
    try:
        store: Store = next(rendezvous("env://"))[0]
    except (RuntimeError, ValueError, OSError) as error:
        msg = f"no store there: {' '.join(str(error).split())}"
        raise ConfigError(f"{msg} - at MASTER_ADDR - {hint}") from error
    return store
