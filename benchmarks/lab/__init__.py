"""The network lab: updates between hosts whose links have a limited rate; `__main__` says how to run it."""
