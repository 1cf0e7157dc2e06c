"""Members in Ray actors: the actor, the messages, and the ensemble's side. `ray` is imported on first use."""
