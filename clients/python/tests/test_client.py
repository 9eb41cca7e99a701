"""Tries the client with the daemon at TAPLINE_SOCKET, which has nothing yet; TAPLINE_ROOM is a directory for disks."""

import json
import os
import threading
import unittest

import tapline

MIB = 1 << 20


class WithADaemon(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.client = tapline.Client(os.environ["TAPLINE_SOCKET"])
        directory = os.path.join(os.environ["TAPLINE_ROOM"], "python")
        os.mkdir(directory)
        source = {"type": "dir", "path": directory}
        made = cls.client.wait(cls.client.sr_create(name="python", source=source, format="qcow2"))
        cls.sr = made["uuid"]

    def make(self, name, **more):
        return self.client.wait(self.client.vdi_create(sr=self.sr, name=name, size=16 * MIB, **more))["uuid"]

    def test_a_disk_lives_from_creation_to_destruction(self):
        disk = self.make("life", tags=["a", "b"], other_config={"owner": "me"})
        shown = self.client.vdi_show(disk)
        self.assertEqual((shown["name"], shown["size"], shown["tags"]), ("life", 16 * MIB, ["a", "b"]))
        self.assertEqual(self.client.vdi_patch(disk, name="new name", tags=[])["name"], "new name")
        self.client.wait(self.client.vdi_resize(disk, size=32 * MIB))
        snapshot = self.client.wait(self.client.vdi_snapshot(disk, name="before"))["uuid"]
        of_it = [vdi["name"] for vdi in self.client.vdi_list(snapshot_of=disk)]
        self.assertEqual(of_it, ["before"])
        plan = self.client.vdi_destroy(disk, dry_run=True)
        self.assertIn("removes", plan)
        for one in (snapshot, disk):
            self.client.wait(self.client.vdi_destroy(one))
        with self.assertRaises(tapline.Problem) as refused:
            self.client.vdi_show(disk)
        self.assertEqual((refused.exception.code, refused.exception.status), ("not-found", 404))

    def test_a_refusal_says_which_field_and_what_to_do(self):
        with self.assertRaises(tapline.Problem) as refused:
            self.client.vdi_create(sr=self.sr, name="odd", size=1000)
        self.assertEqual((refused.exception.code, refused.exception.field), ("invalid", "size"))
        self.assertTrue(refused.exception.detail)

    def test_a_task_that_fails_raises_its_problem(self):
        disk = self.make("plugged")
        vbd = self.client.vbd_create(vdi=disk, transport="nbd")["uuid"]
        self.client.wait(self.client.vbd_plug(vbd))
        with self.assertRaises(tapline.Problem) as refused:
            self.client.wait(self.client.sr_detach(self.sr))
        self.assertEqual(refused.exception.code, "in-use")
        self.client.wait(self.client.vbd_unplug(vbd, force=True))
        self.assertIsNone(self.client.vbd_destroy(vbd))

    def test_lists_have_all_pages(self):
        names = {f"page-{number}" for number in range(5)}
        for name in names:
            self.make(name)
        found = {vdi["name"] for vdi in self.client.vdi_list(sr=self.sr, limit=2)}
        self.assertLessEqual(names, found)

    def test_a_change_is_refused_if_the_object_has_changed(self):
        disk = self.make("stale")
        with self.assertRaises(tapline.Problem) as refused:
            self.client.vdi_patch(disk, name="other", if_match='"not its tag"')
        self.assertEqual(refused.exception.status, 412)
        self.assertEqual(self.client.vdi_show(disk)["name"], "stale")

    def test_events_tell_of_a_new_disk(self):
        begun, told = threading.Event(), []

        def follow():
            stream = self.client.event_follow(kind="vdi", after=0)
            begun.set()
            for event in stream:
                if (event.get("object") or {}).get("name") == "told":
                    told.append(event["change"])
                    return

        reader = threading.Thread(target=follow, daemon=True)
        reader.start()
        begun.wait(60)
        self.make("told")
        reader.join(60)
        self.assertEqual(told, ["added"])

    def test_every_operation_of_the_document_is_a_method(self):
        document = self.client.openapi()
        wanted = {operation["operationId"] for item in document["paths"].values() for operation in item.values()}
        self.assertEqual({name for name in wanted if not hasattr(self.client, name)}, set())
        self.assertEqual(json.loads(json.dumps(document))["openapi"][:2], "3.")


class WithoutADaemon(unittest.TestCase):
    def test_where_nothing_listens_the_error_names_the_place(self):
        with self.assertRaisesRegex(tapline.Unreachable, "/nowhere/taplined.sock"):
            tapline.Client("/nowhere/taplined.sock").host_show()

    def test_a_token_is_never_sent_without_tls(self):
        with self.assertRaisesRegex(ValueError, "only reached over TLS"):
            tapline.Client(url="http://host:80", token="secret")


if __name__ == "__main__":
    unittest.main()
