"""One line for each library: import `backhaul.integrations.NAME`, which imports that library.

`import backhaul` imports none of them. docs/integrations has a page for each.
"""
