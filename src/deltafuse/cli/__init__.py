"""The command line. Commands live in modules of their own and import what they need when they run."""
