"""Participation with one plain object a device, as it would be told to a person."""


class Device:
    def __init__(self):
        self.ready, self.rounds = 0, []


def replay(num_devices, attempts, *, min_separation):
    """Follows recorded attempts `(round, chosen, reporters)`; yields each device's state after every attempt."""
    devices = [Device() for _ in range(num_devices)]
    for round, chosen, reporters in attempts:
        for d in chosen:
            assert devices[d].ready <= round, "chosen before its timer ran out"
            devices[d].ready = round + min_separation
        for d in reporters:
            devices[d].rounds.append(round)
        yield devices
