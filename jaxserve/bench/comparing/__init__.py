"""`bench compare`: two files of records, number by number.

records -> loads that both files have (`pairing`) -> numbers with what they are a statistic of (`measures`)
        -> ratios and how sure they are (`intervals`) -> verdicts (`verdicts`)
"""

from jaxserve.bench.comparing.pairing import Pair, Pairing, load_records, pair_up
from jaxserve.bench.comparing.verdicts import Comparison, Verdict, compare

__all__ = ["Comparison", "Pair", "Pairing", "Verdict", "compare", "load_records", "pair_up"]
