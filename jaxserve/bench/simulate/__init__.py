"""`bench simulate`: replicas without devices, in virtual time.

    workload -> controller -> replica: the real scheduler, loop and cache around a device that only takes time
                                       (`step_times`: given numbers, or those that `bench latency` measured;
                                       `roofline`: what a model takes at least on a chip that is not there)

What is simulated is the device and the clock. Who waits, who is batched with whom, what is cached and evicted, and which
replica serves whom is decided by the code that serves.
"""

from jaxserve.bench.simulate.report import Report as Report
from jaxserve.bench.simulate.simulator import Simulation as Simulation
from jaxserve.bench.simulate.step_times import LinearStepTimes as LinearStepTimes
from jaxserve.bench.simulate.step_times import MeasuredStepTimes as MeasuredStepTimes
from jaxserve.bench.simulate.step_times import evenly as evenly
from jaxserve.bench.simulate.workload import Arrival as Arrival
from jaxserve.bench.simulate.workload import SharedPrefixes as SharedPrefixes
from jaxserve.bench.simulate.workload import read_trace as read_trace
