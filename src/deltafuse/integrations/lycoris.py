"""The name ``lycoris`` answered by this package.

``install_as_lycoris()`` makes ``import lycoris`` and every ``lycoris.<path>`` give the module of the same path of this
package: the same objects, not copies, so ``lycoris.modules.LoConModule is deltafuse.modules.LoConModule``. The
installed distribution and its metadata are left alone.

A script that cannot be changed is run with::

    python -m deltafuse.integrations.lycoris script.py ARGS...
    python -m deltafuse.integrations.lycoris -m package.module ARGS...

Launchers that start processes of their own take the module in place of the script, for example
``accelerate launch -m deltafuse.integrations.lycoris script.py``.
"""

from __future__ import annotations

import sys

from .alias import AliasError, LycorisAlias, install_as_lycoris, main, uninstall_lycoris_alias

__all__ = ["AliasError", "LycorisAlias", "install_as_lycoris", "main", "uninstall_lycoris_alias"]

if __name__ == "__main__":
    sys.exit(main())
