"""From notebooks to the report: the runner, what a stage leaves behind, the report's pages, the site."""
