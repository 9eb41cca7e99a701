//! `image convert` from standard input and to standard output.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::process::{Child, Stdio};
use std::thread::sleep;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::tool::{Room, Said, TAPLINE};

const MIB: u64 = 1 << 20;

/// Runs a command with a file as its standard input.
fn with_input(room: &Room, words: &str, file: &str) -> Said {
    let input = File::open(room.file(file)).unwrap();
    Said::of(&room.command(TAPLINE).args(words.split_whitespace()).stdin(input).output().unwrap())
}

/// Runs a command that reads these bytes from a pipe.
fn with_pipe(room: &Room, words: &str, bytes: &[u8]) -> Said {
    let mut child = start(room, words);
    // A command that refuses its input does not read it.
    child.stdin.take().unwrap().write_all(bytes).ok();
    Said::of(&child.wait_with_output().unwrap())
}

fn start(room: &Room, words: &str) -> Child {
    let mut command = room.command(TAPLINE);
    let command = command.args(words.split_whitespace()).stdin(Stdio::piped()).stdout(Stdio::piped());
    command.stderr(Stdio::piped()).spawn().unwrap()
}

/// Returns the bytes that a command writes to standard output.
fn output_of(room: &Room, words: &str) -> Vec<u8> {
    let done = room.command(TAPLINE).args(words.split_whitespace()).output().unwrap();
    assert!(done.status.success(), "{words}: {}", String::from_utf8_lossy(&done.stderr));
    done.stdout
}

/// Returns the files of a room, except those created by the test.
fn others(room: &Room, made: &[&str]) -> Vec<String> {
    let names = fs::read_dir(room.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| !made.contains(&name.as_str())).collect()
}

#[test]
fn a_raw_disk_on_standard_input_becomes_an_image_of_any_format() {
    let room = Room::new();
    room.make_raw("a.raw", 33 * MIB + 512);
    let bytes = room.read("a.raw");
    for (n, target) in ["raw:b", "vhd:b", "vhd:b --fixed", "qcow2:b"].into_iter().enumerate() {
        let target = target.replace(":b", &format!(":{n}"));
        let said = with_input(&room, &format!("image convert - {target} --json"), "a.raw");
        assert_eq!(said.code, Some(0), "{target}: {said:?}");
        let image = target.split_whitespace().next().unwrap();
        assert_eq!(room.json(&format!("image compare raw:a.raw {image}"))["same"], true, "{target}");
        room.sound_and_closed(image);
    }
    let said = with_pipe(&room, &format!("image convert raw:- qcow2:piped --size {}", bytes.len()), &bytes);
    assert_eq!(said.code, Some(0), "{said:?}");
    assert!(said.out.starts_with("converted raw:- to qcow2:piped: "), "{said:?}");
    assert_eq!(room.json("image compare raw:a.raw qcow2:piped")["same"], true);
    assert!(room.space("piped") < 16 * MIB, "zeroes have become holes");
}

#[test]
fn a_disk_goes_to_standard_output_raw_or_as_a_fixed_vhd() {
    let room = Room::new();
    room.make_raw("a.raw", 32 * MIB);
    room.done("image convert raw:a.raw qcow2:a.qcow2");
    assert!(output_of(&room, "image convert qcow2:a.qcow2 -") == room.read("a.raw"));
    room.write("b.vhd", &output_of(&room, "image convert qcow2:a.qcow2 vhd:- --fixed"));
    assert_eq!(room.json("image compare raw:a.raw vhd:b.vhd")["same"], true);
    room.sound_and_closed("vhd:b.vhd");
    let larger = output_of(&room, "image convert qcow2:a.qcow2 - --size 34M");
    assert!(larger[..32 << 20] == room.read("a.raw") && larger.len() == 34 << 20);
    assert!(larger[32 << 20..].iter().all(|&byte| byte == 0));
    let both = with_pipe(&room, "image convert - - --size 1K", &[7; 1024]);
    assert!(both.code == Some(0) && both.out.as_bytes() == [7; 1024], "{both:?}");
    assert!(both.err.contains("converted raw:- to raw:-: "), "{both:?}");
}

#[test]
fn input_that_is_too_short_or_too_long_leaves_no_image() {
    let room = Room::new();
    let (mut bytes, words) = (vec![1; 3 << 20], "image convert - qcow2:a --size 2M");
    for len in [0, 512, 2 << 20, (2 << 20) + 100_000] {
        let expected = if len == 2 << 20 { Some(0) } else { Some(4) };
        let said = with_pipe(&room, words, &bytes[..len]);
        assert_eq!(said.code, expected, "{len}: {said:?}");
        match len {
            0 | 512 => assert!(said.err.contains(&format!("ended after {len} bytes, but the disk has 2097152"))),
            2_097_152 => fs::remove_file(room.file("a")).unwrap(),
            _ => assert!(said.err.contains("data behind that, at byte 2097152 of the disk"), "{said:?}"),
        }
        assert_eq!(others(&room, &[]), [""; 0], "{len}");
    }
    bytes[2 << 20..].fill(0);
    assert_eq!(with_pipe(&room, words, &bytes).code, Some(0), "what is cut off is zero");
    assert_eq!(room.json("image info qcow2:a")[0]["size"], 2 * MIB);
    room.write("short.raw", &bytes[..1 << 20]);
    let said = with_input(&room, "image convert - qcow2:b --size 2M", "short.raw");
    assert!(said.code == Some(4) && said.err.contains("ended after 1048576 bytes"), "{said:?}");
}

#[test]
fn what_cannot_be_streamed_is_refused_with_advice() {
    let room = Room::new();
    room.make_raw("a.raw", 16 * MIB);
    for (words, advice) in [
        ("image convert - qcow2:b", "add --size"),
        ("image convert qcow2:- raw:b --size 1M", "save it in a file first"),
        ("image convert raw:a.raw qcow2:-", "convert to a file"),
        ("image convert raw:a.raw vhd:-", "--fixed"),
        ("image convert raw:a.raw - --json", "omit --json"),
        ("image convert raw:a.raw - --verify", "omit --verify"),
        ("image convert - raw:b --size 1M --salvage", "omit --parent and --salvage"),
    ] {
        let said = with_pipe(&room, words, &[1; 1024]);
        assert!(said.code == Some(64) && said.err.contains(advice), "{words}: {said:?}");
        assert!(said.out.is_empty(), "{words}");
    }
    room.done("image convert raw:a.raw qcow2:a.qcow2");
    let said = with_input(&room, "image convert - vhd:b", "a.qcow2");
    assert!(said.code == Some(64) && said.err.contains("like an image of the format qcow2"), "{said:?}");
    assert_eq!(others(&room, &["a.raw", "a.qcow2"]), [""; 0]);
    assert_eq!(with_input(&room, "image convert - vhd:b --really-raw", "a.qcow2").code, Some(0));
}

/// `script` gives a command a terminal.
#[test]
fn a_disk_is_neither_written_to_a_terminal_nor_read_from_one() {
    let room = Room::new();
    room.make_raw("a.raw", 16 * MIB);
    for words in ["image convert raw:a.raw -", "image convert - raw:b --size 1M"] {
        let said = room.run_words("script", &["-qec", &format!("{TAPLINE} {words}"), "/dev/null"]);
        assert!(said.code == Some(64) && said.out.contains("it is a terminal"), "{words}: {said:?}");
        assert!(said.out.len() < 1000, "{words}");
    }
}

#[test]
fn a_reader_that_has_gone_is_an_error() {
    let room = Room::new();
    room.make_raw("a.raw", 64 * MIB);
    let mut child = start(&room, "image convert raw:a.raw -");
    let mut first = [0; 512];
    child.stdout.take().unwrap().read_exact(&mut first).unwrap();
    let said = Said::of(&child.wait_with_output().unwrap());
    assert!(said.code == Some(4) && said.err.contains("has ended early"), "{said:?}");
}

#[test]
fn an_image_has_its_name_only_when_it_is_complete() {
    let room = Room::new();
    for signal in [Signal::TERM, Signal::KILL] {
        let mut child = start(&room, "image convert - qcow2:a --size 64M");
        child.stdin.as_mut().unwrap().write_all(&[1; 3 << 20]).unwrap();
        while !room.file("a.tapline-new").exists() {
            sleep(Duration::from_millis(2));
        }
        kill_process(Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap(), signal).unwrap();
        // Its input stays open, so it does not end by itself.
        let code = child.wait().unwrap().code();
        assert!(!room.file("a").exists());
        assert_eq!(
            (code, room.file("a.tapline-new").exists()),
            match signal {
                Signal::TERM => (Some(4), false),
                _ => (None, true),
            }
        );
    }
    let said = with_pipe(&room, "image convert - qcow2:a --size 3M", &[1; 3 << 20]);
    assert_eq!(said.code, Some(0), "{said:?}");
    assert_eq!(others(&room, &["a"]), [""; 0]);
}
