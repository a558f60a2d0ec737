"""Pipeline schedules as lists of actions, and how long each takes."""
