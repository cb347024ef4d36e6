"""What a method costs per client: operations, stored parameters, memory, time, as in table 5 of the FedAlign paper."""

from __future__ import annotations

from fedflat.cost.counting import counting, forward_macs, weight_parameters
from fedflat.cost.step import Cost, cost_of
from fedflat.cost.timing import in_turns

__all__ = ["Cost", "cost_of", "counting", "forward_macs", "in_turns", "weight_parameters"]
