"""The check that lists of actions can run.

A device runs its actions in order. Lists can run when nobody waits for ever
(cost_models/pipeline/makespan.py) and when between two devices messages are received in the order
in which they are sent, which is what links with one queue per direction (NCCL) ask for.
"""

from collections import Counter

from meshfold.cost_models.pipeline.actions import ActionLists, Pass, StageAction
from meshfold.cost_models.pipeline.makespan import StageTimes, simulate_actions
from meshfold.cost_models.pipeline.schedules import Schedule
from meshfold.errors import OptionError


def check_actions(actions: ActionLists, schedule: Schedule) -> None:
    """Raises OptionError, naming stage and action, where the lists cannot run to their end with the
    stages and microbatches of `schedule`."""
    _check_complete(actions, schedule)
    try:
        simulate_actions(actions, StageTimes.build([1.0] * schedule.num_stages, 1.0))
    except ValueError as error:
        raise OptionError(f"schedule: {error}") from error
    _check_queues(actions, schedule)


def _check_complete(actions: ActionLists, schedule: Schedule) -> None:
    num_stages, num_microbatches = schedule.num_stages, schedule.num_microbatches
    given = Counter(a for device in actions for a in device)
    kinds = [Pass.FORWARD, Pass.BACKWARD]
    if any(a.kind is Pass.WEIGHT_GRADIENT for a in given):
        kinds.append(Pass.WEIGHT_GRADIENT)
    for stage in range(num_stages):
        for kind in kinds:
            for j in range(num_microbatches):
                count = given[StageAction(stage, kind, j)]
                if count != 1:
                    raise OptionError(
                        f"schedule: {StageAction(stage, kind, j)} occurs {count} times; every "
                        "action of every stage and microbatch occurs once"
                    )
    for k, device in enumerate(actions):
        for action in device:
            if action.stage >= num_stages or schedule.device_of(action.stage) != k:
                raise OptionError(f"schedule: {action} does not belong on device {k}")


def _check_queues(actions: ActionLists, schedule: Schedule) -> None:
    """The order of sending is that of receiving, for every pair of devices and kind of pass. What a
    device passes to itself waits in no queue."""
    num_stages, device_of = schedule.num_stages, schedule.device_of
    sent: dict[tuple[int, int, Pass], list[StageAction]] = {}
    received: dict[tuple[int, int, Pass], list[StageAction]] = {}
    for k, device in enumerate(actions):
        for action in device:
            step = {Pass.FORWARD: 1, Pass.BACKWARD: -1}.get(action.kind, 0)
            to = action.stage + step
            if step and 0 <= to < num_stages and device_of(to) != k:
                sent.setdefault((k, device_of(to), action.kind), []).append(action)
            source = action.stage - step
            if step and 0 <= source < num_stages and device_of(source) != k:
                message = StageAction(source, action.kind, action.microbatch)
                received.setdefault((device_of(source), k, action.kind), []).append(message)
    for (source, to, _), messages in sent.items():
        expected = received[source, to, messages[0].kind]
        for message, wanted in zip(messages, expected, strict=True):
            if message != wanted:
                raise OptionError(
                    f"schedule: device {source} sends {message} where device {to} waits for "
                    f"{wanted}"
                )
