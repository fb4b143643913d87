"""Everything that uses private API of torch. A new release of torch is checked against this folder."""
