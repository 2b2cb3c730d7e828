"""Bridges to other packages. Nothing is imported here: each bridge loads what it needs when it is used."""
