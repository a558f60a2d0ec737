"""The slowest of n: a step is over when its last device is.

Equal devices are not equally fast: chips, clocks and temperatures differ, and every step waits for
the slowest of all. With step times spread normally around their mean, of standard deviation sigma,
the expected largest of n is (Gumbel; bounds in Boucheron, Lugosi, Massart: Concentration
Inequalities, 2013, section 2.5)

    E max <= mean + sigma sqrt(2 ln n)

and that is what is charged, as a factor on all compute: 1 for one device, and the same for every
plan on a cluster, so that bounds stay bounds.
"""

import math


def slowest_factor(num_devices: int, spread: float) -> float:
    """By what the slowest of num_devices is slower than their mean. spread: sigma / mean."""
    return 1 + spread * math.sqrt(2 * math.log(num_devices))
