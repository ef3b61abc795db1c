"""Add up the history of a spool: for each day how many runs ended how, and how many CPU hours were given."""

import collections
import datetime
import json
import os

days = collections.defaultdict(collections.Counter)
with open(os.path.join(os.environ["SPOOL_DIR"], "history.jsonl"), encoding="utf-8") as history:
    for line in history:
        try:
            run = json.loads(line)
        except ValueError:
            continue  # a line that a power cut tore
        day = days[run["ended_at"][:10]]
        day[run["outcome"]] += 1
        if "started_at" in run:
            # Nine digits after the point are more than datetime reads.
            began, ended = (datetime.datetime.fromisoformat(run[key][:26]) for key in ("started_at", "ended_at"))
            day["cpu seconds"] += (ended - began).total_seconds() * run.get("granted_cpus", 0)
for date, day in sorted(days.items()):
    hours = day.pop("cpu seconds", 0) / 3600
    outcomes = ", ".join(f"{number} {outcome}" for outcome, number in sorted(day.items()))
    print(f"{date}  {outcomes}; {hours:.2f} CPU hours")
