"""A regular package, because some peers install one of the same name, which would hide a namespace of folders."""
