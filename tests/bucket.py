"""A bucket of s3:// as a folder of this machine, the one that $BUCKETS names, for every process that imports this."""

import os

import fsspec
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

ROOT = "BUCKETS"  # the variable that names the folder


class Bucket(DirFileSystem):
    """s3://bucket/file is $BUCKETS/bucket/file."""

    protocol = "s3"
    sep = "/"

    def __init__(self, **more):
        super().__init__(os.environ[ROOT], LocalFileSystem(auto_mkdir=True), **more)


fsspec.register_implementation("s3", Bucket, clobber=True)
