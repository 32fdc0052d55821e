"""Closed forms of GPT-2's FLOPs, memory and traffic."""

from functools import partial

from jaxdist.accounting.decoder import DecoderFootprint, Tables
from jaxdist.accounting.exchanges import EXCHANGES
from jaxdist.accounting.flops import decoder_flops
from jaxdist.accounting.forms import Accounting

TABLES = Tables(
    # R, Q, K, S: as Llama's. F: what goes into GELU.
    kept={"R": (2, 0), "Q": (2, 0), "K": (2, 0), "S": (0, 1), "F": (1, 0)},
    selective={"R": (2, 0), "Q": (1, 0), "K": (2, 0), "F": (1, 0)},
    # F: what goes into GELU by tanh, and what its formula makes of that on the way.
    working={"R": (0, 4), "D": (0, 2), "Q": (1, 1), "K": (0, 2), "S": (0, 1), "F": (5, 1)},
    # F: what goes into GELU, its tanh and its gradient, and the result, transposed.
    on_cpus={"R": (2, 0), "D": (0, 2), "Q": (1, 1), "K": (0, 2), "S": (0, 2), "F": (4, 0)},
)
ACCOUNTING = Accounting(decoder_flops, partial(DecoderFootprint, tables=TABLES), EXCHANGES)
