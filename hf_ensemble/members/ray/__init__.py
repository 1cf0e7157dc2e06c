"""Members in Ray actors: what lives in the actor, what travels, and what the ensemble sees. `ray` is imported on use."""
