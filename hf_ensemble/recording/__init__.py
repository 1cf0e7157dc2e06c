"""Who decided what."""
