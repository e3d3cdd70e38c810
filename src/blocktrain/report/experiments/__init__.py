"""The experiments of the paper (arXiv 2606.24722) at a chosen scale, one module a story; `reproduce` runs them one after another."""
