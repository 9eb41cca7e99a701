"""The operations of the API. Generated from docs/openapi.json by `cargo xtask clients`: not to be edited."""

from ._transport import UNSET, Transport


def _given(fields):
    return {name: value for name, value in fields.items() if value is not UNSET}


class Operations(Transport):
    """Each operation as a method with the API's name; what is left out is the daemon's default."""

    def backup_target_add(self, *, name, path, key_file=UNSET, s3=UNSET, target_id=UNSET, uuid=UNSET):
        """Registers the backup target in a directory of the host or in a bucket. Nothing is written there.

        key_file: The file with its key, readable by its owner only; required if it is encrypted.
        name: A unique name.
        path: The directory, or the bucket: `s3://BUCKET[/PREFIX]`.
        s3: How its bucket is reached; required for one, and only for one.
        target_id: The ID that the target must have; if omitted, that of the target found there.
        uuid: Its identity; a random one if omitted.

        Returns a `BackupTarget`.
        """
        body = _given({
            "key_file": key_file, "name": name, "path": path, "s3": s3, "target_id": target_id, "uuid": uuid,
        })
        return self.request("POST", "/v1/backup-targets", body=body)

    def backup_target_backups(self, uuid, *, vdi=UNSET, limit=UNSET, after=UNSET):
        """Lists the backups on a target, the oldest first.

        vdi: Only backups of this VDI of this host, and of its snapshots.
        limit: At most this many; if there are more, the header `Link` has the next page. All if omitted.
        after: Only what comes after the one with this UUID, the last one of the previous page.

        Yields each `DiskBackup`.
        """
        return self.pages(f"/v1/backup-targets/{uuid}/backups", {"vdi": vdi, "limit": limit, "after": after})

    def backup_target_list(self, *, name=UNSET, match=UNSET, limit=UNSET, after=UNSET):
        """Lists the backup targets by name.

        name: Only the one with this name.
        match: Only those with this name or UUID prefix (at least four digits).
        limit: At most this many; if there are more, the header `Link` has the next page. All if omitted.
        after: Only what comes after the one with this UUID, the last one of the previous page.

        Yields each `BackupTarget`.
        """
        return self.pages("/v1/backup-targets", {"name": name, "match": match, "limit": limit, "after": after})

    def backup_target_prune(
        self, uuid, *, daily=UNSET, grace=UNSET, hourly=UNSET, last=UNSET, monthly=UNSET, vdi=UNSET, vm=UNSET,
        weekly=UNSET,
    ):
        """Removes the backups that are superfluous by a rule, and frees space. Another host may use the target
        meanwhile.

        daily: Days of which the last one is retained.
        grace: Hours for which objects are spared that no backup refers to, because they may be of a running backup; 24
            if omitted.
        hourly: Hours of which the last one is retained.
        last: The number of last backups that are retained.
        monthly: Months of which the last one is retained.
        vdi: Only backups of this VDI of this host, alone; if omitted, those of each machine and disk, by themselves.
        vm: Only backups of this VM of this host, with all of its disks.
        weekly: Weeks, from Monday, of which the last one is retained.

        Returns a `Task` to wait for.
        """
        body = _given({
            "daily": daily, "grace": grace, "hourly": hourly, "last": last, "monthly": monthly, "vdi": vdi, "vm": vm,
            "weekly": weekly,
        })
        return self.request("POST", f"/v1/backup-targets/{uuid}/prune", body=body)

    def backup_target_remove(self, uuid):
        """Forgets a backup target. The backups on it stay, and it can be registered again."""
        return self.request("DELETE", f"/v1/backup-targets/{uuid}")

    def backup_target_remove_backups(self, uuid, *, backups):
        """Removes backups, and frees the space that no other backup needs.

        backups: The backups.

        Returns a `Task` to wait for.
        """
        body = _given({"backups": backups})
        return self.request("POST", f"/v1/backup-targets/{uuid}/remove-backups", body=body)

    def backup_target_restore(
        self, uuid, *, backup, name, sr, description=UNSET, format=UNSET, logical_block_size=UNSET, other_config=UNSET,
        tags=UNSET, new_uuid=UNSET,
    ):
        """Restores a backup to a new VDI. The task's result contains its UUID.

        backup: The backup.
        description: Its description.
        format: Format; the repository's default if omitted.
        logical_block_size: Size of the sectors that a guest addresses, in bytes; if omitted, that of the disk that was
            backed up.
        name: The name of the new VDI, unique in its repository.
        other_config: Strings that programs keep with it.
        sr: The repository of the new VDI.
        tags: Words to find it by.
        new_uuid: The UUID of the new VDI; a random one if omitted.

        Returns a `Task` to wait for.
        """
        body = _given({
            "backup": backup, "description": description, "format": format, "logical_block_size": logical_block_size,
            "name": name, "other_config": other_config, "sr": sr, "tags": tags, "uuid": new_uuid,
        })
        return self.request("POST", f"/v1/backup-targets/{uuid}/restore", body=body)

    def backup_target_restore_vm(self, uuid, *, backup, name, sr, description=UNSET, new_uuid=UNSET):
        """Restores a backup of a VM to a new VM, halted, with new disks. The task's result contains its UUID.

        backup: The backup of any of its disks: the others are found by it.
        description: Its description; that of the original if omitted.
        name: The name of the new VM.
        sr: The repository of the new disks.
        new_uuid: The UUID of the new VM; a random one if omitted.

        Returns a `Task` to wait for.
        """
        body = _given({"backup": backup, "description": description, "name": name, "sr": sr, "uuid": new_uuid})
        return self.request("POST", f"/v1/backup-targets/{uuid}/restore-vm", body=body)

    def backup_target_show(self, uuid):
        """Gets a backup target.

        Returns a `BackupTarget`.
        """
        return self.request("GET", f"/v1/backup-targets/{uuid}")

    def backup_target_verify(self, uuid):
        """Reads and proves everything on a target. The task fails if a backup has lost something.

        Returns a `Task` to wait for.
        """
        return self.request("POST", f"/v1/backup-targets/{uuid}/verify")

    def docs(self):
        """Gets a page that shows this document in a browser."""
        return self.request("GET", "/v1/docs")

    def download_list(self, *, limit=UNSET, after=UNSET):
        """Lists the downloads.

        limit: At most this many; if there are more, the header `Link` has the next page. All if omitted.
        after: Only what comes after the one with this UUID, the last one of the previous page.

        Yields each `Download`.
        """
        return self.pages("/v1/downloads", {"limit": limit, "after": after})

    def download_read(self, uuid, *, offset):
        """Reads a piece of a download: 4 MiB from `offset` on, or less at the end of the file.

        offset: Where in the file the piece begins, in bytes.
        """
        query = {"offset": offset}
        return self.request("GET", f"/v1/downloads/{uuid}/data", query=query)

    def download_remove(self, uuid):
        """Removes a download."""
        return self.request("DELETE", f"/v1/downloads/{uuid}")

    def download_show(self, uuid):
        """Gets a download.

        Returns a `Download`.
        """
        return self.request("GET", f"/v1/downloads/{uuid}")

    def event_follow(self, *, after=UNSET, limit=UNSET, kind=UNSET, uuid=UNSET):
        """All changes of objects from now on, or after the event given by the header `Last-Event-ID` or by `after`.

        after: The last event number that the client knows; later events are sent first.
        limit: End the stream after this many events.
        kind: Only changes of this kind of object.
        uuid: Only changes of the object with this UUID.
        """
        return self.events("/v1/events", {"after": after, "limit": limit, "kind": kind, "uuid": uuid})

    def host_backup(self):
        """Creates a backup of the catalogue now.

        Returns a `Backup`.
        """
        return self.request("POST", "/v1/host/backups")

    def host_backups(self, *, reason=UNSET, limit=UNSET, after=UNSET):
        """Lists the backups of the catalogue, the newest first; `after` is the `file` of one. Restoring one is not part
        of the API: use `taplined --restore`.

        reason: Only those that were made for this reason.
        limit: At most this many; if there are more, the header `Link` has the next page. All if omitted.
        after: Only what comes after the one with this UUID, the last one of the previous page.

        Yields each `Backup`.
        """
        return self.pages("/v1/host/backups", {"reason": reason, "limit": limit, "after": after})

    def host_drain(self, *, timeout=UNSET):
        """Unplugs all VBDs in bounded time, before the host shuts down. Merely stopping the daemon leaves disks
        running.

        timeout: Grace period before forced unplug, in seconds, at most one day; everything that was acknowledged is
            flushed in either case.

        Returns a `Task` to wait for.
        """
        body = _given({"timeout": timeout})
        return self.request("POST", "/v1/host/drain", body=body)

    def host_reconcile(self, *, dry_run=UNSET):
        """Compares running disks, and files and inventories of attached repositories, with the catalogue; returns the
        differences. Where it is certain what happened, the catalogue is updated from a running disk; repositories are
        only compared: a scan records their files.

        dry_run: Only report differences; change nothing.
        """
        body = _given({"dry_run": dry_run})
        return self.request("POST", "/v1/host/reconcile", body=body)

    def host_show(self):
        """Gets the host and its daemon.

        Returns a `Host`.
        """
        return self.request("GET", "/v1/host")

    def index(self):
        """Gets an index: the version of the daemon, and the paths of collections and documents.

        Returns a `Index`.
        """
        return self.request("GET", "/v1")

    def metrics(self):
        """Gets metrics of the daemon, its repositories and its disks, in the text format of OpenMetrics."""
        return self.request("GET", "/metrics")

    def openapi(self):
        """Gets this document."""
        return self.request("GET", "/v1/openapi.json")

    def problem_list(self, *, limit=UNSET, after=UNSET):
        """Lists the types of problems by status; `after` is the `type` of one.

        limit: At most this many; if there are more, the header `Link` has the next page. All if omitted.
        after: Only what comes after the one with this UUID, the last one of the previous page.

        Yields each `ProblemType`.
        """
        return self.pages("/v1/problems", {"limit": limit, "after": after})

    def problem_show(self, code):
        """Gets a type of problems.

        code: The code of such problems

        Returns a `ProblemType`.
        """
        return self.request("GET", f"/v1/problems/{code}")

    def sr_attach(self, uuid, *, believe=UNSET, if_match=None):
        """Attaches a repository. Images in it that are no longer needed are then merged and removed.

        believe: Which side to keep if the repository's inventory and the catalogue have diverged; if omitted, attaching
            then fails.

        Returns a `Task` to wait for.
        """
        body = _given({"believe": believe})
        return self.request("POST", f"/v1/srs/{uuid}/attach", body=body, if_match=if_match)

    def sr_calibrate(self, uuid, *, read_only=UNSET, seconds=UNSET, vdi=UNSET, if_match=None):
        """Measures which sizes of transfers suit a repository's storage, and has its disks follow that from then on,
        where `split` and `merge` of the repository are `auto`. It writes to a file of its own, of 256 MiB, which is
        gone afterwards; no disk of the repository may be in use, and one that comes into use ends it. The task's result
        has the fields of an `SrCalibrated`.

        read_only: Only read, and do that although disks of the repository are in use. Otherwise a file is written to
            that the daemon creates for that, and none may be.
        seconds: For how long, about. 45 by default.
        vdi: The VDI whose image file is read; by default the largest one that is full of data. Only with `read_only`.

        Returns a `Task` to wait for.
        """
        body = _given({"read_only": read_only, "seconds": seconds, "vdi": vdi})
        return self.request("POST", f"/v1/srs/{uuid}/calibrate", body=body, if_match=if_match)

    def sr_create(
        self, *, name, source, description=UNSET, format=UNSET, other_config=UNSET, reserve=UNSET, tags=UNSET,
        uuid=UNSET,
    ):
        """Creates a repository in an empty directory and attaches it. The task's result contains its UUID.

        description: Its description.
        format: Default format of new VDIs.
        name: Its name.
        other_config: Strings that programs keep with it.
        reserve: Bytes to keep free, at most 2^62.
        source: The storage: an empty directory.
        tags: Words to find it by.
        uuid: Its identity; a random one if omitted.

        Returns a `Task` to wait for.
        """
        body = _given({
            "description": description, "format": format, "name": name, "other_config": other_config, "reserve":
            reserve, "source": source, "tags": tags, "uuid": uuid,
        })
        return self.request("POST", "/v1/srs", body=body)

    def sr_destroy(self, uuid, *, dry_run=UNSET, if_match=None):
        """Removes a repository without VDIs, and its files. Files of others stay in the directory.

        dry_run: Change nothing; only report what would be done.

        Returns a `Task` to wait for, or a `SrDestroyPlan`.
        """
        query = {"dry_run": dry_run}
        return self.request("DELETE", f"/v1/srs/{uuid}", query=query, if_match=if_match)

    def sr_detach(self, uuid, *, if_match=None):
        """Detaches a repository, none of whose VBDs may be plugged.

        Returns a `Task` to wait for.
        """
        return self.request("POST", f"/v1/srs/{uuid}/detach", if_match=if_match)

    def sr_forget(self, uuid, *, if_match=None):
        """Forgets a detached repository and its VDIs. Its files stay: it can be introduced again."""
        return self.request("POST", f"/v1/srs/{uuid}/forget", if_match=if_match)

    def sr_introduce(
        self, *, source, description=UNSET, name=UNSET, other_config=UNSET, reserve=UNSET, tags=UNSET, uuid=UNSET,
    ):
        """Adds an existing repository, or turns a directory of existing images into one, and attaches it; a scan then
        adds its images. The task's result contains its UUID.

        description: Description; if omitted, the recorded one.
        name: Name; if omitted, the recorded one, or the one it had when it was last attached.
        other_config: Strings that programs keep with it, instead of the recorded ones.
        reserve: Bytes to keep free, at most 2^62.
        source: The storage of the repository.
        tags: Words to find it by, instead of the recorded ones.
        uuid: Identity, if it is already a repository; otherwise it is assigned.

        Returns a `Task` to wait for.
        """
        body = _given({
            "description": description, "name": name, "other_config": other_config, "reserve": reserve, "source":
            source, "tags": tags, "uuid": uuid,
        })
        return self.request("POST", "/v1/srs/introduce", body=body)

    def sr_inventory(self, uuid):
        """Gets the inventory of an attached repository from its own file.

        Returns a `Inventory`.
        """
        return self.request("GET", f"/v1/srs/{uuid}/inventory")

    def sr_inventory_at(self, *, source):
        """Gets the inventory of the repository on a storage, whether it is known here or not. Changes nothing.

        source: The storage to probe.

        Returns a `Inventory`.
        """
        body = _given({"source": source})
        return self.request("POST", "/v1/srs/inventory", body=body)

    def sr_list(self, *, name=UNSET, match=UNSET, state=UNSET, type=UNSET, tag=UNSET, limit=UNSET, after=UNSET):
        """Lists the repositories by name.

        name: Only those with this name.
        match: Only those with this name or UUID prefix (at least four digits).
        state: Only those in this state.
        type: Only those on storage of this type: dir, nfs, smb or iso.
        tag: Only those with this tag; with several, those that have all of them.
        limit: At most this many; if there are more, the header `Link` has the next page. All if omitted.
        after: Only what comes after the one with this UUID, the last one of the previous page.

        Yields each `Sr`.
        """
        return self.pages("/v1/srs", {
            "name": name, "match": match, "state": state, "type": type, "tag": tag, "limit": limit, "after": after,
        })

    def sr_patch(
        self, uuid, *, description=UNSET, merge=UNSET, name=UNSET, other_config=UNSET, reserve=UNSET, share_depth=UNSET,
        split=UNSET, tags=UNSET, if_match=None,
    ):
        """Changes the name, description, tags, strings of programs or reserve of a repository, its share depth, or what
        is done to the sizes of its disks' transfers. Plugged disks follow the last two within moments.

        description: Its description.
        merge: The size up to which adjacent transfers of its disks are merged. auto by default.
        name: Its name.
        other_config: Strings that programs keep with it, instead of those it has.
        reserve: Bytes to keep free, at most 2^62.
        share_depth: Requests in flight of all its plugged disks together, beyond which a disk waits that has had more
            than others: about what the storage can do at once. 128 by default.
        split: The size of the pieces into which larger transfers of its disks are split. auto by default.
        tags: Words to find it by, instead of those it has.

        Returns a `Sr`.
        """
        body = _given({
            "description": description, "merge": merge, "name": name, "other_config": other_config, "reserve": reserve,
            "share_depth": share_depth, "split": split, "tags": tags,
        })
        return self.request("PATCH", f"/v1/srs/{uuid}", body=body, if_match=if_match)

    def sr_policy(self, uuid):
        """Gets what a calibration of a repository's storage has found, with all that was measured.

        Returns a `SrCalibration`.
        """
        return self.request("GET", f"/v1/srs/{uuid}/policy")

    def sr_policy_forget(self, uuid, *, if_match=None):
        """Forgets what a calibration of a repository's storage has found. Its disks leave their transfers as they are
        from then on, where `split` and `merge` of the repository are `auto`."""
        return self.request("DELETE", f"/v1/srs/{uuid}/policy", if_match=if_match)

    def sr_probe(self, *, source):
        """Looks for a repository on a storage; changes nothing.

        source: The storage to probe.
        """
        body = _given({"source": source})
        return self.request("POST", "/v1/srs/probe", body=body)

    def sr_scan(self, uuid, *, if_match=None):
        """Synchronizes the catalogue with a repository's files. Images that no VDI needs are then merged and removed.
        The task's result has the fields of a `Scan`.

        Returns a `Task` to wait for.
        """
        return self.request("POST", f"/v1/srs/{uuid}/scan", if_match=if_match)

    def sr_show(self, uuid):
        """Gets a repository.

        Returns a `Sr`.
        """
        return self.request("GET", f"/v1/srs/{uuid}")

    def statistics_list(self, *, vm=UNSET, sr=UNSET, latencies=UNSET, layers=UNSET, limit=UNSET, after=UNSET):
        """Lists the statistics of plugged VBDs, by machine and position; `after` is the `vbd` of one.

        vm: Only those of this VM.
        sr: Only those of VDIs in this repository.
        latencies: With the latencies of all requests, which are a good part of the work.
        layers: With the layers above and beneath: guests are queried, which wakes them up.
        limit: At most this many; if there are more, the header `Link` has the next page. All if omitted.
        after: Only what comes after the one with this UUID, the last one of the previous page.

        Yields each `DiskStatistics`.
        """
        return self.pages("/v1/statistics", {
            "vm": vm, "sr": sr, "latencies": latencies, "layers": layers, "limit": limit, "after": after,
        })

    def task_abandon(self, uuid, *, if_match=None):
        """Abandons a task that can neither complete nor roll back, or makes no progress, and releases its objects. VDIs
        that it was changing are then diverged.

        Returns a `Task`.
        """
        return self.request("POST", f"/v1/tasks/{uuid}/abandon", if_match=if_match)

    def task_cancel(self, uuid, *, if_match=None):
        """Cancels a task, which then rolls back what it has done. The response does not wait for that.

        Returns a `Task`.
        """
        return self.request("POST", f"/v1/tasks/{uuid}/cancel", if_match=if_match)

    def task_list(self, *, open=UNSET, state=UNSET, verb=UNSET, about=UNSET, limit=UNSET, after=UNSET):
        """Lists the tasks, the latest first.

        open: Only unfinished tasks.
        state: Only those in this state.
        verb: Only those of this verb: vdi-snapshot.
        about: Only those about the object with this UUID.
        limit: At most this many; if there are more, the header `Link` has the next page. All if omitted.
        after: Only what comes after the one with this UUID, the last one of the previous page.

        Yields each `Task`.
        """
        return self.pages("/v1/tasks", {
            "open": open, "state": state, "verb": verb, "about": about, "limit": limit, "after": after,
        })

    def task_show(self, uuid, *, wait=UNSET):
        """Gets a task.

        wait: Answer when the task has ended, or after this many seconds.

        Returns a `Task`.
        """
        query = {"wait": wait}
        return self.request("GET", f"/v1/tasks/{uuid}", query=query)

    def token_create(self, *, name, expires=UNSET, read_only=UNSET, role=UNSET, tag=UNSET, uuid=UNSET):
        """Creates a token and returns its secret, this one time only. Only over the socket, by root.

        expires: When the token expires; must be in the future.
        name: A unique name that says what the token is for.
        read_only: Whether the token is read-only: the same as the role `reader`.
        role: What its holder may do; `admin` if omitted.
        tag: The tag of the objects that an operator may operate.
        uuid: Its identity; a random one if omitted.

        Returns a `TokenMade`.
        """
        body = _given({
            "expires": expires, "name": name, "read_only": read_only, "role": role, "tag": tag, "uuid": uuid,
        })
        return self.request("POST", "/v1/tokens", body=body)

    def token_list(self, *, name=UNSET, limit=UNSET, after=UNSET):
        """Lists the tokens by name, including expired ones. Only over the socket, by root.

        name: Only the one with this name.
        limit: At most this many; if there are more, the header `Link` has the next page. All if omitted.
        after: Only what comes after the one with this UUID, the last one of the previous page.

        Yields each `Token`.
        """
        return self.pages("/v1/tokens", {"name": name, "limit": limit, "after": after})

    def token_revoke(self, uuid):
        """Revokes a token, which closes the connections that use it. Only over the socket, by root."""
        return self.request("DELETE", f"/v1/tokens/{uuid}")

    def token_show(self, uuid):
        """Gets a token. Only over the socket, by root.

        Returns a `Token`.
        """
        return self.request("GET", f"/v1/tokens/{uuid}")

    def upload_append(self, uuid, data, *, offset, last=UNSET):
        """Appends a piece of at most 16 MiB to an upload. When the answer is lost, get the upload: it says where to
        continue.

        offset: Where in the file the piece begins, in bytes: where the last one has ended.
        last: Whether the file ends with this piece, which may be empty.

        Returns a `Upload`.
        """
        query = {"offset": offset, "last": last}
        return self.request("POST", f"/v1/uploads/{uuid}/append", query=query, body=data)

    def upload_create(self, *, name, sr, size=UNSET):
        """Creates an upload. Its pieces are appended, and it is then imported (`vdi_import`). It ends one hour after
        its last piece, and with the daemon.

        name: Name of the client's file, for messages.
        size: Length of the whole file, in bytes; if omitted, the file ends with the piece that is said to be the last.
        sr: The repository whose space the file takes until it has been imported.

        Returns a `Upload`.
        """
        body = _given({"name": name, "size": size, "sr": sr})
        return self.request("POST", "/v1/uploads", body=body)

    def upload_list(self, *, limit=UNSET, after=UNSET):
        """Lists the uploads.

        limit: At most this many; if there are more, the header `Link` has the next page. All if omitted.
        after: Only what comes after the one with this UUID, the last one of the previous page.

        Yields each `Upload`.
        """
        return self.pages("/v1/uploads", {"limit": limit, "after": after})

    def upload_remove(self, uuid):
        """Removes an upload."""
        return self.request("DELETE", f"/v1/uploads/{uuid}")

    def upload_show(self, uuid):
        """Gets an upload, and how much of it has arrived.

        Returns a `Upload`.
        """
        return self.request("GET", f"/v1/uploads/{uuid}")

    def vbd_connect(self, uuid, *, for_):
        """The configuration to paste for a machine that is managed elsewhere, so that it gets this VBD. For QEMU,
        libvirt and Cloud Hypervisor the VBD must be plugged; for xl, which serves the image itself, it must not.

        for_: The machine monitor or manager to configure.
        """
        query = {"for": for_}
        return self.request("GET", f"/v1/vbds/{uuid}/connect", query=query)

    def vbd_create(
        self, *, vdi, autostart=UNSET, bootable=UNSET, limits=UNSET, mode=UNSET, other_config=UNSET, position=UNSET,
        queues=UNSET, share_weight=UNSET, tags=UNSET, transport=UNSET, uuid=UNSET, vm=UNSET,
    ):
        """Creates a VBD, which is not plugged yet.

        autostart: Autostart when the host boots, only for VBDs that belong to no VM; disabled by default.
        bootable: Whether the VM may boot from it; by default only from its first disk.
        limits: The limits of its disk; none by default.
        mode: Access mode; by default what the VDI allows.
        other_config: Strings that programs keep with it.
        position: Position among the disks of its VM, 0 to 254; the first free one by default.
        queues: Number of queues offered to the guest, 1 to 64; by default one per processor of the VM, at most 4.
        share_weight: Its disk's weight among those that share its storage: 100 by default.
        tags: Words to find it by.
        transport: Transport; by default what the VM's driver needs, or vhost-user without a VM.
        uuid: Its identity; a random one if omitted.
        vdi: The VDI.
        vm: The VM; omitted for a machine that is managed elsewhere.

        Returns a `Vbd`.
        """
        body = _given({
            "autostart": autostart, "bootable": bootable, "limits": limits, "mode": mode, "other_config": other_config,
            "position": position, "queues": queues, "share_weight": share_weight, "tags": tags, "transport": transport,
            "uuid": uuid, "vdi": vdi, "vm": vm,
        })
        return self.request("POST", "/v1/vbds", body=body)

    def vbd_destroy(self, uuid, *, if_match=None):
        """Removes a VBD, which must be unplugged."""
        return self.request("DELETE", f"/v1/vbds/{uuid}", if_match=if_match)

    def vbd_history(self, uuid):
        """Gets the last day of a VBD, by minute, plugged or not. Minutes without requests are left out. It survives a
        restart of the daemon, and is lost with the VBD.

        Returns a `VbdHistory`.
        """
        return self.request("GET", f"/v1/vbds/{uuid}/history")

    def vbd_limit(
        self, uuid, *, bandwidth=UNSET, burst_ms=UNSET, iops=UNSET, read_bandwidth=UNSET, read_iops=UNSET,
        write_bandwidth=UNSET, write_iops=UNSET, if_match=None,
    ):
        """Limits the requests and bytes per second of the disk of a VBD. The body has all of its limits: an omitted one
        is removed, and an empty object removes all. A plugged disk is limited at once: requests that wait for a limit
        that is removed or raised continue. The limits stay when the VBD is unplugged and plugged again.

        bandwidth: Bytes per second that are read and written.
        burst_ms: The burst that an unused disk saves up: the amount that each limit allows in this many milliseconds.
            100 by default.
        iops: Requests per second: reads, writes and discards, not flushes.
        read_bandwidth: Bytes per second that are read; not more than bandwidth.
        read_iops: Reads per second; not more than iops.
        write_bandwidth: Bytes per second that are written; not more than bandwidth.
        write_iops: Writes per second; not more than iops.

        Returns a `Vbd`.
        """
        body = _given({
            "bandwidth": bandwidth, "burst_ms": burst_ms, "iops": iops, "read_bandwidth": read_bandwidth, "read_iops":
            read_iops, "write_bandwidth": write_bandwidth, "write_iops": write_iops,
        })
        return self.request("POST", f"/v1/vbds/{uuid}/limit", body=body, if_match=if_match)

    def vbd_list(self, *, sr=UNSET, vm=UNSET, vdi=UNSET, match=UNSET, state=UNSET, tag=UNSET, limit=UNSET, after=UNSET):
        """Lists the VBDs by VM and position.

        sr: Only those of VDIs in this repository.
        vm: Only those of this VM.
        vdi: Only those of this VDI.
        match: Only those with this UUID prefix (at least four digits).
        state: Only those in this state.
        tag: Only those with this tag; with several, those that have all of them.
        limit: At most this many; if there are more, the header `Link` has the next page. All if omitted.
        after: Only what comes after the one with this UUID, the last one of the previous page.

        Yields each `Vbd`.
        """
        return self.pages("/v1/vbds", {
            "sr": sr, "vm": vm, "vdi": vdi, "match": match, "state": state, "tag": tag, "limit": limit, "after": after,
        })

    def vbd_patch(self, uuid, *, autostart=UNSET, other_config=UNSET, tags=UNSET, if_match=None):
        """Changes the tags and strings of programs of a VBD, and whether one that belongs to no VM is plugged when the
        host boots.

        autostart: Autostart when the host boots, only for VBDs that belong to no VM; null disables it.
        other_config: Strings that programs keep with it, instead of those it has.
        tags: Words to find it by, instead of those it has.

        Returns a `Vbd`.
        """
        body = _given({"autostart": autostart, "other_config": other_config, "tags": tags})
        return self.request("PATCH", f"/v1/vbds/{uuid}", body=body, if_match=if_match)

    def vbd_plug(self, uuid, *, if_match=None):
        """Plugs a VBD: its VDI is served at a socket.

        Returns a `Task` to wait for.
        """
        return self.request("POST", f"/v1/vbds/{uuid}/plug", if_match=if_match)

    def vbd_plug_many(self, *, force=UNSET, vbds=UNSET, vm=UNSET):
        """Plugs several VBDs: those listed, or all unplugged ones of a VM. Each reports its own failure.

        force: For unplug: do not wait for guests to release their disks.
        vbds: The VBDs that are meant.
        vm: The VM whose VBDs are meant.

        Returns a `Task` to wait for.
        """
        body = _given({"force": force, "vbds": vbds, "vm": vm})
        return self.request("POST", "/v1/vbds/plug", body=body)

    def vbd_share(self, uuid, *, weight, if_match=None):
        """Sets the weight of the disk of a VBD among the disks that share its storage, at once if it is plugged. While
        the storage is saturated, disks share it in proportion to their weights. With `plug.shares = false` the weight
        is recorded, and the problem tells that it is not in force.

        weight: A disk with twice the weight of another one gets twice as much while both use the storage; 100 by
            default.

        Returns a `Vbd`.
        """
        body = _given({"weight": weight})
        return self.request("POST", f"/v1/vbds/{uuid}/share", body=body, if_match=if_match)

    def vbd_show(self, uuid):
        """Gets a VBD.

        Returns a `Vbd`.
        """
        return self.request("GET", f"/v1/vbds/{uuid}")

    def vbd_statistics(self, uuid):
        """Gets the statistics of a plugged VBD, with the latencies of all its requests, and the layers above and
        beneath it.

        Returns a `DiskStatistics`.
        """
        return self.request("GET", f"/v1/vbds/{uuid}/statistics")

    def vbd_unplug(self, uuid, *, force=UNSET, if_match=None):
        """Unplugs a VBD when its guest has released it, or at once with force. Also cancels a plug in progress.

        force: Do not wait for the guest to release the disk; unflushed data is lost.

        Returns a `Task` to wait for.
        """
        body = _given({"force": force})
        return self.request("POST", f"/v1/vbds/{uuid}/unplug", body=body, if_match=if_match)

    def vbd_unplug_many(self, *, force=UNSET, vbds=UNSET, vm=UNSET):
        """Unplugs several VBDs: those listed, or all plugged ones of a VM.

        force: For unplug: do not wait for guests to release their disks.
        vbds: The VBDs that are meant.
        vm: The VM whose VBDs are meant.

        Returns a `Task` to wait for.
        """
        body = _given({"force": force, "vbds": vbds, "vm": vm})
        return self.request("POST", "/v1/vbds/unplug", body=body)

    def vbd_upgrade(self, uuid, *, if_match=None):
        """Replaces the process that serves a plugged VBD with the installed program. Its guest keeps running; its
        requests wait for a moment. If the upgrade fails, the old process continues.

        Returns a `Task` to wait for.
        """
        return self.request("POST", f"/v1/vbds/{uuid}/upgrade", if_match=if_match)

    def vdi_backup(self, uuid, *, target, full=UNSET, repair=UNSET, if_match=None):
        """Backs up a VDI, which may be plugged, to a target. The task's result contains the ID of the backup.

        full: Read everything, even if it is known what has changed since the last backup.
        repair: Verify the target first, read everything, and send again what is damaged there: other backups of the
            same data are whole again.
        target: The backup target.

        Returns a `Task` to wait for.
        """
        body = _given({"full": full, "repair": repair, "target": target})
        return self.request("POST", f"/v1/vdis/{uuid}/backup", body=body, if_match=if_match)

    def vdi_cbt_disable(self, uuid, *, if_match=None):
        """Stops recording which blocks of a VDI change. The maps of its snapshots stay.

        Returns a `Task` to wait for.
        """
        return self.request("POST", f"/v1/vdis/{uuid}/cbt-disable", if_match=if_match)

    def vdi_cbt_enable(self, uuid, *, if_match=None):
        """Records from now on which blocks of a VDI change, while it is plugged; it may be plugged now.

        Returns a `Task` to wait for.
        """
        return self.request("POST", f"/v1/vdis/{uuid}/cbt-enable", if_match=if_match)

    def vdi_changes(self, uuid, *, from_, format=UNSET):
        """Lists the parts of a VDI or a snapshot that may differ from an earlier snapshot. It names too much at most.
        An error if not all changes are known.

        from_: An earlier snapshot.
        format: How the changed parts are listed.

        Returns a `VdiChanges`.
        """
        query = {"from": from_, "format": format}
        return self.request("GET", f"/v1/vdis/{uuid}/changes", query=query)

    def vdi_clone(
        self, uuid, *, description=UNSET, name=UNSET, other_config=UNSET, tags=UNSET, new_uuid=UNSET, if_match=None,
    ):
        """Creates a writable clone of a VDI, which may be plugged.

        description: Its description.
        name: Name of the clone; if omitted, the VDI's name with `-clone`, and a number if that is taken.
        other_config: Strings that programs keep with it.
        tags: Words to find it by.
        new_uuid: Its identity; a random one if omitted.

        Returns a `Task` to wait for.
        """
        body = _given({
            "description": description, "name": name, "other_config": other_config, "tags": tags, "uuid": new_uuid,
        })
        return self.request("POST", f"/v1/vdis/{uuid}/clone", body=body, if_match=if_match)

    def vdi_copy(
        self, uuid, *, sr, format=UNSET, name=UNSET, other_config=UNSET, tags=UNSET, new_uuid=UNSET, if_match=None,
    ):
        """Makes a full copy of a VDI.

        format: Format; the repository's default if omitted.
        name: Name of the copy; if omitted, the VDI's name, or if that is taken, the name with `-copy`.
        other_config: Strings that programs keep with it.
        sr: The repository to create it in.
        tags: Words to find it by.
        new_uuid: Its identity; a random one if omitted.

        Returns a `Task` to wait for.
        """
        body = _given({
            "format": format, "name": name, "other_config": other_config, "sr": sr, "tags": tags, "uuid": new_uuid,
        })
        return self.request("POST", f"/v1/vdis/{uuid}/copy", body=body, if_match=if_match)

    def vdi_create(
        self, *, name, size, sr, allow_duplicate_name=UNSET, description=UNSET, format=UNSET, logical_block_size=UNSET,
        other_config=UNSET, tags=UNSET, uuid=UNSET,
    ):
        """Creates an empty VDI. The task's result contains its UUID.

        allow_duplicate_name: Whether another VDI in the repository may have the same name.
        description: Its description.
        format: Format; the repository's default if omitted.
        logical_block_size: Size of the sectors that a guest addresses, in bytes; 512 if omitted.
        name: Its name.
        other_config: Strings that programs keep with it.
        size: Size seen by a guest, in bytes.
        sr: The repository to create it in.
        tags: Words to find it by.
        uuid: Its identity; a random one if omitted.

        Returns a `Task` to wait for.
        """
        body = _given({
            "allow_duplicate_name": allow_duplicate_name, "description": description, "format": format,
            "logical_block_size": logical_block_size, "name": name, "other_config": other_config, "size": size, "sr":
            sr, "tags": tags, "uuid": uuid,
        })
        return self.request("POST", "/v1/vdis", body=body)

    def vdi_data_destroy(self, uuid, *, if_match=None):
        """Destroys the data of a snapshot of a VDI whose changed blocks are recorded. The snapshot stays, in the state
        `no-data`: the changes since can still be listed. The space of data that no other VDI needs is freed.

        Returns a `Task` to wait for.
        """
        return self.request("POST", f"/v1/vdis/{uuid}/data-destroy", if_match=if_match)

    def vdi_destroy(self, uuid, *, dry_run=UNSET, if_match=None):
        """Destroys a VDI. Its file is removed unless other images are based on it; in that case it is removed or merged
        later. With `dry_run` nothing is changed, and the response says what would be.

        dry_run: Only report what would be removed.

        Returns a `Task` to wait for, or a `VdiDestroyPlan`.
        """
        query = {"dry_run": dry_run}
        return self.request("DELETE", f"/v1/vdis/{uuid}", query=query, if_match=if_match)

    def vdi_export(self, uuid, *, format, download=UNSET, path=UNSET, if_match=None):
        """Writes a VDI to a new file on the host.

        download: Whether the file is for the client to fetch: the task's result has the UUID of a download. Until it is
            removed, it takes space in the repository of the VDI.
        format: Format of the file.
        path: The file on the daemon's host, which must not exist.

        Returns a `Task` to wait for.
        """
        body = _given({"download": download, "format": format, "path": path})
        return self.request("POST", f"/v1/vdis/{uuid}/export", body=body, if_match=if_match)

    def vdi_import(
        self, *, name, source_format, sr, allow_duplicate_name=UNSET, checksum=UNSET, description=UNSET, format=UNSET,
        insecure_http=UNSET, logical_block_size=UNSET, other_config=UNSET, path=UNSET, really_raw=UNSET, tags=UNSET,
        upload=UNSET, url=UNSET, uuid=UNSET,
    ):
        """Creates a VDI from a file on the host.

        allow_duplicate_name: Whether another VDI in the repository may have the same name.
        checksum: The digest that the file at an HTTP server must have, or where that is found.
        description: Its description.
        format: Format of the VDI; the repository's default if omitted.
        insecure_http: Whether the file is read over plain HTTP, where anyone on the way can change it, although its
            digest is not given.
        logical_block_size: Size of the sectors that a guest addresses, in bytes; if omitted, that which the file
            records, or 512 if its format cannot record it.
        name: Its name.
        other_config: Strings that programs keep with it.
        path: The file on the daemon's host, which must not have a backing file.
        really_raw: Whether a file that is raw is taken for that although it looks like an image of another format.
        source_format: Format of the file; it is never guessed.
        sr: The repository to create it in.
        tags: Words to find it by.
        upload: The upload, all of which has arrived. It is gone when the VDI has been created.
        url: The file at an HTTP server. It is downloaded into the repository as a whole first.
        uuid: Its identity; a random one if omitted.

        Returns a `Task` to wait for.
        """
        body = _given({
            "allow_duplicate_name": allow_duplicate_name, "checksum": checksum, "description": description, "format":
            format, "insecure_http": insecure_http, "logical_block_size": logical_block_size, "name": name,
            "other_config": other_config, "path": path, "really_raw": really_raw, "source_format": source_format, "sr":
            sr, "tags": tags, "upload": upload, "url": url, "uuid": uuid,
        })
        return self.request("POST", "/v1/vdis/import", body=body)

    def vdi_list(
        self, *, sr=UNSET, vm=UNSET, snapshot_of=UNSET, name=UNSET, match=UNSET, state=UNSET, tag=UNSET, limit=UNSET,
        after=UNSET,
    ):
        """Lists the VDIs by name.

        sr: Only those in this repository.
        vm: Only those that this VM has as VBDs.
        snapshot_of: Only snapshots of this VDI.
        name: Only those with this name.
        match: Only those with this name or UUID prefix (at least four digits).
        state: Only those in this state.
        tag: Only those with this tag; with several, those that have all of them.
        limit: At most this many; if there are more, the header `Link` has the next page. All if omitted.
        after: Only what comes after the one with this UUID, the last one of the previous page.

        Yields each `Vdi`.
        """
        return self.pages("/v1/vdis", {
            "sr": sr, "vm": vm, "snapshot_of": snapshot_of, "name": name, "match": match, "state": state, "tag": tag,
            "limit": limit, "after": after,
        })

    def vdi_merge(self, uuid, *, if_match=None):
        """Merges images of a VDI's chain that are no longer needed; the VDI may be plugged. This also happens
        automatically.

        Returns a `Task` to wait for.
        """
        return self.request("POST", f"/v1/vdis/{uuid}/merge", if_match=if_match)

    def vdi_patch(
        self, uuid, *, backup_schedule=UNSET, description=UNSET, logical_block_size=UNSET, name=UNSET,
        other_config=UNSET, read_only=UNSET, retention=UNSET, scheduled=UNSET, tags=UNSET, if_match=None,
    ):
        """Changes the name, description, tags, strings of programs, schedule of snapshots or read-only flag of a VDI.

        backup_schedule: The schedule by which it is backed up, and how many backups are retained; null ends it. The
            backups stay.
        description: Its description.
        logical_block_size: Size of the sectors that a guest addresses, in bytes; cannot be changed while it is plugged.
            A guest finds its partitions only with the size with which it made them.
        name: Its name.
        other_config: Strings that programs keep with it, instead of those it has.
        read_only: Whether the VDI is read-only; cannot be changed while it is plugged.
        retention: The schedule by which snapshots of it are taken, and how many are kept; null ends it.
        scheduled: False has a scheduled snapshot stay that its schedule would destroy one day.
        tags: Words to find it by, instead of those it has.

        Returns a `Vdi`.
        """
        body = _given({
            "backup_schedule": backup_schedule, "description": description, "logical_block_size": logical_block_size,
            "name": name, "other_config": other_config, "read_only": read_only, "retention": retention, "scheduled":
            scheduled, "tags": tags,
        })
        return self.request("PATCH", f"/v1/vdis/{uuid}", body=body, if_match=if_match)

    def vdi_reconcile(self, uuid, *, believe, if_match=None):
        """Resolves a diverged VDI, whose running disk and catalogue entry disagree.

        believe: Which side is right.

        Returns a `Vdi`.
        """
        body = _given({"believe": believe})
        return self.request("POST", f"/v1/vdis/{uuid}/reconcile", body=body, if_match=if_match)

    def vdi_resize(self, uuid, *, size, if_match=None):
        """Grows a VDI, which may be plugged.

        size: New size seen by a guest, in bytes; cannot be smaller than the current size.

        Returns a `Task` to wait for.
        """
        body = _given({"size": size})
        return self.request("POST", f"/v1/vdis/{uuid}/resize", body=body, if_match=if_match)

    def vdi_restore_in_place(self, uuid, *, backup, target, other_disk=UNSET, if_match=None):
        """Replaces the contents of a VDI that is not plugged by those of a backup of it. It gets the size and the
        sector size of the backup, and is otherwise the same: its snapshots, VBDs and schedules stay. Data written since
        is lost.

        backup: The backup.
        other_disk: Accept a backup of another disk, or of another host.
        target: The backup target.

        Returns a `Task` to wait for.
        """
        body = _given({"backup": backup, "other_disk": other_disk, "target": target})
        return self.request("POST", f"/v1/vdis/{uuid}/restore", body=body, if_match=if_match)

    def vdi_revert(self, uuid, *, snapshot, if_match=None):
        """Reverts an unplugged VDI to one of its snapshots. Data written since then is lost.

        snapshot: The snapshot.

        Returns a `Task` to wait for.
        """
        body = _given({"snapshot": snapshot})
        return self.request("POST", f"/v1/vdis/{uuid}/revert", body=body, if_match=if_match)

    def vdi_show(self, uuid):
        """Gets a VDI.

        Returns a `Vdi`.
        """
        return self.request("GET", f"/v1/vdis/{uuid}")

    def vdi_snapshot(
        self, uuid, *, description=UNSET, name=UNSET, other_config=UNSET, tags=UNSET, new_uuid=UNSET, if_match=None,
    ):
        """Takes a read-only snapshot of a VDI, which may be plugged.

        description: Its description.
        name: Name of the snapshot; if omitted, the VDI's name and the time in UTC: `web@2026-11-23T02:07`.
        other_config: Strings that programs keep with it.
        tags: Words to find it by.
        new_uuid: Its identity; a random one if omitted.

        Returns a `Task` to wait for.
        """
        body = _given({
            "description": description, "name": name, "other_config": other_config, "tags": tags, "uuid": new_uuid,
        })
        return self.request("POST", f"/v1/vdis/{uuid}/snapshot", body=body, if_match=if_match)

    def vm_backup(self, uuid, *, target, full=UNSET, repair=UNSET, if_match=None):
        """Backs up all disks of a VM at one moment, and what the VM is. The task's result contains the IDs of the
        backups.

        full: Read everything, even if it is known what has changed since the last backup.
        repair: Verify the target first, read everything, and send again what is damaged there: other backups of the
            same data are whole again.
        target: The backup target.

        Returns a `Task` to wait for.
        """
        body = _given({"full": full, "repair": repair, "target": target})
        return self.request("POST", f"/v1/vms/{uuid}/backup", body=body, if_match=if_match)

    def vm_clone(self, uuid, *, name, description=UNSET, snapshot=UNSET, new_uuid=UNSET, if_match=None):
        """Creates a halted VM with the hardware of another and thin clones of its disks, as they are at one moment or
        were when a snapshot was taken. Disks that the guest can only read are shared. A network card in a bridge gets
        another address; one at a tap interface is not copied, and the task's result has a `note`.

        description: Its description.
        name: Its name.
        snapshot: The snapshot of the VM to clone; the VM as it is now if omitted.
        new_uuid: Its identity; a random one if omitted.

        Returns a `Task` to wait for.
        """
        body = _given({"description": description, "name": name, "snapshot": snapshot, "uuid": new_uuid})
        return self.request("POST", f"/v1/vms/{uuid}/clone", body=body, if_match=if_match)

    def vm_console(self, uuid, *, recent=UNSET):
        """Gets what a guest has written to its serial port lately. With the headers `Connection: Upgrade` and `Upgrade:
        tapline-console` the connection becomes the console: earlier output, then what the guest writes; what is sent is
        typed.

        recent: How many bytes of earlier output are sent at most; all that are kept, 65536, if omitted.
        """
        query = {"recent": recent}
        return self.request("GET", f"/v1/vms/{uuid}/console", query=query)

    def vm_create(
        self, *, driver, memory, name, vcpus, autostart=UNSET, boot=UNSET, description=UNSET, other_config=UNSET,
        platform=UNSET, seed=UNSET, tags=UNSET, uuid=UNSET,
    ):
        """Creates a VM, which is halted and has no disks.

        autostart: Autostart when the host boots; disabled by default.
        boot: Boot source.
        description: Its description.
        driver: The driver that runs the VM.
        memory: Memory in bytes, a multiple of 1 MiB.
        name: Its name.
        other_config: Strings that programs keep with it.
        platform: Optional hardware.
        seed: The data that cloud-init in the guest reads at its first boot. QEMU only.
        tags: Words to find it by.
        uuid: Its identity; a random one if omitted.
        vcpus: Number of processors.

        Returns a `Vm`.
        """
        body = _given({
            "autostart": autostart, "boot": boot, "description": description, "driver": driver, "memory": memory,
            "name": name, "other_config": other_config, "platform": platform, "seed": seed, "tags": tags, "uuid": uuid,
            "vcpus": vcpus,
        })
        return self.request("POST", "/v1/vms", body=body)

    def vm_destroy(self, uuid, *, if_match=None):
        """Destroys a halted or suspended VM, its saved memory and its VBDs. Its VDIs stay."""
        return self.request("DELETE", f"/v1/vms/{uuid}", if_match=if_match)

    def vm_drop_memory(self, uuid, *, if_match=None):
        """Gives up the saved memory of a suspended VM, which is halted then, as if its power had been cut.

        Returns a `Vm`.
        """
        return self.request("DELETE", f"/v1/vms/{uuid}/memory", if_match=if_match)

    def vm_list(self, *, name=UNSET, match=UNSET, power=UNSET, tag=UNSET, limit=UNSET, after=UNSET):
        """Lists the VMs by name.

        name: Only those with this name.
        match: Only those with this name or UUID prefix (at least four digits).
        power: Only those in this power state.
        tag: Only those with this tag; with several, those that have all of them.
        limit: At most this many; if there are more, the header `Link` has the next page. All if omitted.
        after: Only what comes after the one with this UUID, the last one of the previous page.

        Yields each `Vm`.
        """
        return self.pages("/v1/vms", {
            "name": name, "match": match, "power": power, "tag": tag, "limit": limit, "after": after,
        })

    def vm_patch(
        self, uuid, *, autostart=UNSET, backup_schedule=UNSET, boot=UNSET, description=UNSET, memory=UNSET, name=UNSET,
        other_config=UNSET, platform=UNSET, retention=UNSET, seed=UNSET, tags=UNSET, vcpus=UNSET, if_match=None,
    ):
        """Changes a VM, its schedule of snapshots too; its hardware only while it is halted.

        autostart: Autostart when the host boots; null disables it.
        backup_schedule: The schedule by which it is backed up with all of its disks, and how many backups are retained;
            null ends it. The backups stay.
        boot: Boot source.
        description: Its description.
        memory: Memory in bytes.
        name: Its name.
        other_config: Strings that programs keep with it, instead of those it has.
        platform: Optional hardware.
        retention: The schedule by which snapshots of all its disks are taken, and how many are kept; null ends it.
        seed: Another cloud-init seed; null removes it.
        tags: Words to find it by, instead of those it has.
        vcpus: Number of processors.

        Returns a `Vm`.
        """
        body = _given({
            "autostart": autostart, "backup_schedule": backup_schedule, "boot": boot, "description": description,
            "memory": memory, "name": name, "other_config": other_config, "platform": platform, "retention": retention,
            "seed": seed, "tags": tags, "vcpus": vcpus,
        })
        return self.request("PATCH", f"/v1/vms/{uuid}", body=body, if_match=if_match)

    def vm_pause(self, uuid, *, if_match=None):
        """Pauses the guest of a VM, which stays in memory.

        Returns a `Task` to wait for.
        """
        return self.request("POST", f"/v1/vms/{uuid}/pause", if_match=if_match)

    def vm_restore_in_place(self, uuid, *, backup, target, if_match=None):
        """Replaces the contents of all disks that a halted VM can write by those of a backup of it, or of none. Data
        written since is lost. Its hardware stays. Refused if a disk was added to the VM, or taken from it, since the
        backup.

        backup: The backup of any of its disks: the others are found by it.
        target: The backup target.

        Returns a `Task` to wait for.
        """
        body = _given({"backup": backup, "target": target})
        return self.request("POST", f"/v1/vms/{uuid}/restore", body=body, if_match=if_match)

    def vm_resume(self, uuid, *, if_match=None):
        """Resumes the guest of a paused VM, or of a suspended one, whose disks are plugged for that.

        Returns a `Task` to wait for.
        """
        return self.request("POST", f"/v1/vms/{uuid}/resume", if_match=if_match)

    def vm_revert(self, uuid, *, snapshot, if_match=None):
        """Reverts all disks of a halted VM to a snapshot of it, or none. Data written since then is lost. Its hardware
        stays.

        snapshot: The snapshot of the VM.

        Returns a `Task` to wait for.
        """
        body = _given({"snapshot": snapshot})
        return self.request("POST", f"/v1/vms/{uuid}/revert", body=body, if_match=if_match)

    def vm_screen(self, uuid):
        """Opens the screen of a VM: its VNC server (RFB), as a WebSocket with the subprotocol `tapline.screen`. Over
        TCP a browser sends its token as a second subprotocol, `tapline.token.SECRET`."""
        return self.request("GET", f"/v1/vms/{uuid}/screen")

    def vm_show(self, uuid):
        """Gets a VM.

        Returns a `Vm`.
        """
        return self.request("GET", f"/v1/vms/{uuid}")

    def vm_shutdown(self, uuid, *, force=UNSET, force_after=UNSET, if_match=None):
        """Shuts a VM down: presses its power button, waits until the guest has powered off, and unplugs its VBDs. With
        `force_after` it is stopped by force after that time; with `force` it is stopped at once, as if its power were
        cut, and other operations on it are aborted.

        force: Stop it at once, as if its power were cut.
        force_after: Seconds that the guest may take before it is stopped by force, at most one day. By default it is
            never stopped by force.

        Returns a `Task` to wait for.
        """
        body = _given({"force": force, "force_after": force_after})
        return self.request("POST", f"/v1/vms/{uuid}/shutdown", body=body, if_match=if_match)

    def vm_snapshot(self, uuid, *, description=UNSET, name=UNSET, new_uuid=UNSET, if_match=None):
        """Takes snapshots of all writable disks of a VM at one moment, or none: what was acknowledged before the first
        one was taken is in all of them. A running guest is paused for that moment. The task's result has the snapshot's
        UUID.

        description: Its description.
        name: Its name; if omitted, the VM's name and the time in UTC: `web@2026-11-23T02:07`.
        new_uuid: Its identity; a random one if omitted.

        Returns a `Task` to wait for.
        """
        body = _given({"description": description, "name": name, "uuid": new_uuid})
        return self.request("POST", f"/v1/vms/{uuid}/snapshot", body=body, if_match=if_match)

    def vm_snapshot_destroy(self, uuid, snapshot, *, if_match=None):
        """Destroys a snapshot of a VM, and those of its disks that are still there.

        Returns a `Task` to wait for.
        """
        return self.request("DELETE", f"/v1/vms/{uuid}/snapshots/{snapshot}", if_match=if_match)

    def vm_snapshot_list(self, uuid, *, name=UNSET, match=UNSET, limit=UNSET, after=UNSET):
        """Lists the snapshots of a VM, the oldest first.

        name: Only those with this name.
        match: Only those with this name or UUID prefix (at least four digits).
        limit: At most this many; if there are more, the header `Link` has the next page. All if omitted.
        after: Only what comes after the one with this UUID, the last one of the previous page.

        Yields each `VmSnapshot`.
        """
        return self.pages(f"/v1/vms/{uuid}/snapshots", {"name": name, "match": match, "limit": limit, "after": after})

    def vm_snapshot_patch(self, uuid, snapshot, *, scheduled=UNSET, if_match=None):
        """Has a snapshot of a VM stay that its schedule would destroy one day.

        scheduled: False has a scheduled snapshot stay that its schedule would destroy one day.

        Returns a `VmSnapshot`.
        """
        body = _given({"scheduled": scheduled})
        return self.request("PATCH", f"/v1/vms/{uuid}/snapshots/{snapshot}", body=body, if_match=if_match)

    def vm_start(self, uuid, *, if_match=None):
        """Starts a VM: plugs all its VBDs and runs the guest. If this fails or is cancelled, it is rolled back.

        Returns a `Task` to wait for.
        """
        return self.request("POST", f"/v1/vms/{uuid}/start", if_match=if_match)

    def vm_suspend(self, uuid, *, if_match=None):
        """Saves the memory of a running or paused guest to a file, ends its machine and unplugs its VBDs. A start or
        resume continues from there; until then the VM's hardware and disks cannot be changed. If this fails or is
        cancelled before the memory is saved, the guest continues.

        Returns a `Task` to wait for.
        """
        return self.request("POST", f"/v1/vms/{uuid}/suspend", if_match=if_match)
