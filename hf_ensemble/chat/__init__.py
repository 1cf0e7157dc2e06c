"""Conversations: what each member reads of one."""
