"""The one rule table: how an op may be sharded on each mesh axis."""
