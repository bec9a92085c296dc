"""Poller: a workflow that may run for years, with a history that stays short.

Every look is recorded, so a loop without end would have a history without end. `continue_as_new_if_long` says where the
workflow may begin again, and with which arguments; once the history has grown long, it does. It is the same run with
the same inbox, and a restart replays only what came after.
"""

import asyncio
import tempfile

import holdfast as hf

app = hf.App("parcels", limits=hf.Limits(rotation_steps=6))  # very short, to show it; 50 if nothing is said

STOPS = ["warehouse"] * 4 + ["lorry"] * 5 + ["door"]


@app.activity
async def look(parcel: str, day: int) -> str:
    """Ask the carrier where the parcel is."""
    return STOPS[min(day, len(STOPS) - 1)]


@app.workflow
async def follow(parcel: str, day: int = 0, last_seen: str = "") -> str:
    """Look once a day until the parcel is at the door."""
    while (place := await look(parcel, day)) != "door":
        day, last_seen = day + 1, place
        await hf.sleep(0.02)  # a very short day
        hf.continue_as_new_if_long(parcel, day, last_seen)
    return f"{parcel} arrived on day {day}, after it was last seen in the {last_seen}"


async def main(store: str) -> None:
    """Follow a parcel to the door."""
    async with app.node(store):
        run = await app.start(follow, "parcel-7")
        print(await run.result())
        events = await run.events()
        rotations = [event.run_seq for event in events if event.event_type == "ContinuedAsNew"]
        print(f"{len(events)} events; rotated at {rotations}; a restart would replay {len(events) - rotations[-1] + 1}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(main(f"sqlite:///{folder}/poller.db"))
