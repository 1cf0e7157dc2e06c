"""What tokens write, and all members' vocabularies as one."""
