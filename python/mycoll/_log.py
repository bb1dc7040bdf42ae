"""What the Python half says, beside torch.distributed's own lines.

Under torch's logger, so that TORCH_LOGS=distributed shows it, with torch's time, rank and place,
and `logging.getLogger("torch.distributed.mycoll")` takes levels and handlers of one's own. The
engine has no Python and logs for itself: MYCOLL_LOG.
"""

from __future__ import annotations

import logging

log = logging.getLogger("torch.distributed.mycoll")
