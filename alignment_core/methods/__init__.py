"""The methods, a module for each: its recipe, its composition, and how ``align init`` writes a recipe of it.

Another method is another module here, or an entry point of the group ``alignment.methods``; there is no list.
"""
