"""Where rows come from: files, the hub, images, and the demo corpora."""
