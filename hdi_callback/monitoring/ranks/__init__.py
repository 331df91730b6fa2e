"""A run on several ranks: sums over ranks, agreement before each reading, and which layers each rank holds."""

from hdi_callback.monitoring.ranks.ranks import (
    Ranks,
    check_process_group,
    is_first_rank,
    number_of_processes,
    refuse_apart,
    share_within,
)

__all__ = ["Ranks", "check_process_group", "is_first_rank", "number_of_processes", "refuse_apart", "share_within"]
