"""From the `[data]` section to the images of the server and of every client."""

from fedseal.config.sections import DataSettings
from fedseal.data.pool import Federation
from fedseal.data.sources import load_pool
from fedseal.data.splits import split


def load_federation(data: DataSettings, seed: int, *, progress: bool = False) -> Federation:
    """Loads the images, from the cache if possible, and splits them between the server and the clients."""
    return split(load_pool(data, progress=progress), data, seed)
