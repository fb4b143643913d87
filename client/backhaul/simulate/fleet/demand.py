"""What one step of a session asks of each resource. Imports no torch."""

from functools import lru_cache

from backhaul.simulate.costs import Costs
from backhaul.simulate.fleet.block import demand_of_block
from backhaul.simulate.fleet.phases import Demand
from backhaul.simulate.fleet.setup import FleetSetup
from backhaul.simulate.fleet.waiting import demand_of_waiting


@lru_cache(maxsize=4096)
def demand(costs: Costs, setup: FleetSetup, contention: float = 1.0) -> Demand:
    """Returns what a session's step asks for.

    Args:
        costs: Costs of one segment with one micro-batch.
        setup: The fleet to which the session belongs.
        contention: The factor by which the worker's segments take longer than for a session alone. In an accumulation
            block the trainer measures it and computes more segments itself the larger it is.
    """
    return demand_of_block(costs, setup, contention) if setup.is_deferred else demand_of_waiting(costs, setup)
