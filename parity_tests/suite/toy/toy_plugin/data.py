"""The plugin's data: a learnable sequence of numbers."""

import hashlib

import numpy as np

from jaxdist.config import ConfigError, Data, Model
from jaxdist.data import Sequences, Stream


def open_squares(data: Data, model: Model) -> Sequences:
    """Squares modulo the number in data.path."""
    if not data.path.isdecimal():
        raise ConfigError(f"data.path = {data.path!r}: squares are taken modulo a number; give one, as 97")
    ids = (np.arange(20_000) ** 2 % int(data.path) % model.vocab).astype(np.int32)
    stream = Stream([ids], np.array([0, ids.size], np.int64))
    stream.fingerprint = hashlib.blake2b(ids.tobytes(), digest_size=16).hexdigest()
    stream.rows["data"] = f"{ids.size:,} squares modulo {data.path}"
    return Sequences(data, stream)
