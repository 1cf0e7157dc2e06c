"""The bytes that tokens write, and the union of all members' vocabularies."""
