"""The dashboard: watches workers, changes nothing. Free of torch."""
