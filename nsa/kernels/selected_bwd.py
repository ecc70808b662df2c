"""Selected attention, backward."""

from nsa.kernels.selected_dkdv import selected_dkdv
from nsa.kernels.selected_dq import selected_dq

__all__ = ["selected_dkdv", "selected_dq"]
