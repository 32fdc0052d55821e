"""Closed forms of Llama's FLOPs, memory and traffic."""

from functools import partial

from jaxdist.accounting.decoder import DecoderFootprint, Tables
from jaxdist.accounting.exchanges import EXCHANGES
from jaxdist.accounting.flops import decoder_flops
from jaxdist.accounting.forms import Accounting

TABLES = Tables(
    # R: the input, and what attention adds to it. Q, K: queries and keys as their products leave them, values, the
    # result. S: probabilities. F: gate and up.
    kept={"R": (2, 0), "Q": (2, 0), "K": (2, 0), "S": (0, 1), "F": (2, 0)},
    selective={"R": (2, 0), "Q": (1, 0), "K": (2, 0), "F": (2, 0)},
    # R: the input and the sum after attention; each norm before its scale. D: and after it. Q, K: queries and keys as
    # rotated, values, the result. S: probabilities. F: gate, its sigmoid s, 1 - s, gate · s, up, the product.
    working={"R": (2, 2), "D": (0, 2), "Q": (1, 1), "K": (1, 1), "S": (0, 1), "F": (6, 0)},
    # R: the input, and the sum after attention. D: what the products read, transposed. Q, K: as above. S: exponentials
    # and probabilities, or these in 16 bits. F: gate, up, the product and what makes it, and two gradients.
    on_cpus={"R": (2, 0), "D": (0, 2), "Q": (1, 1), "K": (1, 1), "S": (0, 2), "F": (6, 0)},
    # R: the input, the sum after attention, and their gradients. D: what the products read. Q, K: as above, and their
    # gradients. F: gate, up, the product and its gradient.
    on_gpus={"R": (4, 0), "D": (2, 0), "Q": (2, 0), "K": (2, 0), "S": (0, 1), "F": (4, 0)},
)
ACCOUNTING = Accounting(decoder_flops, partial(DecoderFootprint, tables=TABLES), EXCHANGES)
