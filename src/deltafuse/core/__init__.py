"""Facts and policies every other room may rely on: errors, verdicts, costs, precision, backend choice, devices."""
