"""The benchmark harness: `python -m bench --help`."""

import os

# Before torch allocates anything: weights on pages of 2 MB, as the memory is whose read rate is the
# limit, for every implementation alike. Processes of peers inherit it.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
