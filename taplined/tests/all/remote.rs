//! The API over TCP: with TLS only, for holders of valid tokens, and without any effect on local clients.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::net::{AddressFamily, SocketType, bind, connect, socket};
use serde_json::{Value, json};

use crate::harness;
use crate::harness::tls::{Authority, any_token, port, replace, rest, send, token};
use crate::harness::{start_with, wait_until};

#[test]
fn only_holders_of_a_token_have_access() {
    let authority = Authority::new();
    let daemon = authority.start("");
    let secret = any_token(&daemon);
    let host = authority.get(&daemon, Some(&secret), "/host");
    assert_eq!((host.status, &host.json()["uuid"]), (200, &daemon.get("/host").1["uuid"]));
    let path = daemon.room().join("fast");
    std::fs::create_dir(&path).unwrap();
    let asked = json!({ "name": "fast", "source": { "type": "dir", "path": path } });
    let made = authority.ask(&daemon, Some(&secret), "POST /srs", &asked);
    daemon.done((made.status, made.json()));

    let wrong = secret.replace(|_: char| true, "0").replacen("00000000", "tapline_", 1);
    let challenge = "www-authenticate: bearer realm=\"tapline\"";
    for (shown, why) in [(None, ""), (Some(wrong.as_str()), ", error=\"invalid_token\""), (Some("x"), ", error=")] {
        // Without a token, not even the existence of objects is revealed.
        for request in ["GET /host", "GET /nothing", "POST /srs", "DELETE /srs/1"] {
            let refused = authority.ask(&daemon, shown, request, &Value::Null);
            assert_eq!((refused.status, refused.code().as_str()), (401, "unauthorized"), "{shown:?} {request}");
            assert!(refused.head.contains(&format!("{challenge}{why}")), "{}", refused.head);
        }
    }
    assert!(daemon.log().contains("a token was refused") && !daemon.log().contains(&secret));
}

#[test]
fn on_one_connection_each_request_needs_its_token() {
    let authority = Authority::new();
    let daemon = authority.start("");
    let secret = any_token(&daemon);
    let mut talk = authority.connect(&daemon);
    send(&mut talk, Some(&secret), "GET /host", &Value::Null, "");
    send(&mut talk, None, "GET /host", &Value::Null, "connection: close\r\n");
    let answers = rest(&mut talk);
    assert!(answers.starts_with("HTTP/1.1 200 ") && answers.contains("HTTP/1.1 401 "), "{answers}");
    let twice = format!("authorization: Bearer {secret}\r\nconnection: close\r\n");
    let mut talk = authority.connect(&daemon);
    send(&mut talk, Some(&secret), "GET /host", &Value::Null, &twice);
    assert!(rest(&mut talk).starts_with("HTTP/1.1 401 "), "two tokens are none");
}

#[test]
fn a_read_only_token_cannot_change_anything() {
    let authority = Authority::new();
    let daemon = authority.start("");
    let (_, secret) = token(&daemon, json!({ "name": "monitor", "read_only": true }));
    assert_eq!(authority.get(&daemon, Some(&secret), "/srs").status, 200);
    for request in ["POST /srs", "PATCH /srs/1", "DELETE /srs/1", "POST /host/drain"] {
        let refused = authority.ask(&daemon, Some(&secret), request, &Value::Null);
        assert_eq!((refused.status, refused.code().as_str()), (403, "missing-role"), "{request}");
        assert!(refused.head.contains("error=\"insufficient_scope\""), "{}", refused.head);
        assert!(refused.json()["detail"].as_str().unwrap().contains("'monitor'"));
    }
    assert_eq!(daemon.get("/tasks").1, json!([]));
}

#[test]
fn no_token_may_list_create_or_revoke_tokens() {
    let authority = Authority::new();
    let daemon = authority.start("");
    let (uuid, secret) = token(&daemon, json!({ "name": "a" }));
    let revoke = format!("DELETE /tokens/{uuid}");
    for (request, body) in [("GET /tokens", json!({})), ("POST /tokens", json!({ "name": "b" })), (&revoke, json!({}))]
    {
        let refused = authority.ask(&daemon, Some(&secret), request, &body);
        assert_eq!((refused.status, refused.code().as_str()), (403, "forbidden"), "{request}");
    }
    let (_, listed) = daemon.get("/tokens");
    assert_eq!((listed.as_array().unwrap().len(), &listed[0]["uuid"]), (1, &json!(uuid)));
    assert!(!listed.to_string().contains(&secret));
}

#[test]
fn invalid_tokens_are_refused_by_field() {
    let daemon = harness::start();
    token(&daemon, json!({ "name": "a" }));
    for (asked, status, field) in [
        (json!({ "name": "a" }), 409, "name"),
        (json!({ "name": "b", "expires": "2020-01-01T00:00:00Z" }), 400, "expires"),
        (json!({ "name": "b", "days": 7 }), 400, "days"),
        (json!({}), 400, "name"),
    ] {
        let (found, problem) = daemon.post("/tokens", asked);
        assert_eq!(found, status, "{problem}");
        assert!(problem["field"] == field || problem["detail"].as_str().unwrap().contains(field), "{problem}");
    }
    assert_eq!(daemon.delete("/tokens/3f0c0000-0000-0000-0000-000000000000").0, 404);
}

#[test]
fn revoking_a_token_closes_its_connections() {
    let authority = Authority::new();
    let mut daemon = authority.start("");
    let (uuid, secret) = token(&daemon, json!({ "name": "a" }));
    let (_, other) = token(&daemon, json!({ "name": "b" }));
    let mut stream = authority.connect(&daemon);
    send(&mut stream, Some(&secret), "GET /events", &Value::Null, "");
    let mut idle = authority.connect(&daemon);
    send(&mut idle, Some(&secret), "GET /host", &Value::Null, "");
    let mut first = [0; 12];
    stream.read_exact(&mut first).unwrap();
    idle.read_exact(&mut first).unwrap();
    assert_eq!(&first, b"HTTP/1.1 200");
    assert_eq!(daemon.delete(&format!("/tokens/{uuid}")).0, 204);
    // Both must exit, or this waits until it fails.
    rest(&mut stream);
    rest(&mut idle);
    assert_eq!(authority.get(&daemon, Some(&secret), "/host").status, 401);
    assert_eq!(authority.get(&daemon, Some(&other), "/host").status, 200);
    daemon.kill();
    daemon.restart();
    assert_eq!(authority.get(&daemon, Some(&secret), "/host").status, 401);
    assert_eq!(authority.get(&daemon, Some(&other), "/host").status, 200);
}

#[test]
fn an_expiring_token_closes_its_connections() {
    let authority = Authority::new();
    let daemon = authority.start("");
    let ends_in = |seconds: u64| {
        let expires = jiff::Timestamp::now() + Duration::from_secs(seconds);
        let (_, secret) = token(&daemon, json!({ "name": format!("for-{seconds}"), "expires": expires }));
        let mut stream = authority.connect(&daemon);
        send(&mut stream, Some(&secret), "GET /events", &Value::Null, "");
        rest(&mut stream).starts_with("HTTP/1.1 200").then_some(secret)
    };
    // On a busy machine it may expire before it is used.
    let secret = [3, 9, 27].into_iter().find_map(ends_in).expect("it was never good");
    let refused = authority.get(&daemon, Some(&secret), "/host");
    assert_eq!((refused.status, refused.json()["detail"].as_str()), (401, Some("the token has expired")));
}

#[test]
fn plain_http_gets_an_explanation() {
    let authority = Authority::new();
    let daemon = authority.start("");
    let mut stream = TcpStream::connect(("127.0.0.1", port(&daemon))).unwrap();
    stream.write_all(b"GET /v1/host HTTP/1.1\r\nhost: t\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let problem: Value = serde_json::from_str(body).unwrap();
    assert!(head.starts_with("HTTP/1.1 400 ") && problem["code"] == "malformed", "{answer}");
    assert!(problem["detail"].as_str().unwrap().contains("TLS"), "{answer}");
}

/// The output of `openssl s_client` for a request.
fn s_client(authority: &Authority, port: u16, words: &[&str], request: &str) -> (bool, String) {
    let mut client = Command::new("openssl");
    client.args(["s_client", "-connect", &format!("127.0.0.1:{port}"), "-verify_return_error", "-ign_eof", "-CAfile"]);
    client
        .arg(authority.path("ca.pem"))
        .args(words)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut client = client.spawn().unwrap();
    // A refused one has exited by then.
    client.stdin.take().unwrap().write_all(request.as_bytes()).ok();
    let output = client.wait_with_output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&said).into_owned())
}

#[test]
fn openssl_connects_with_tls_1_2_and_1_3_but_nothing_older() {
    let authority = Authority::new();
    let daemon = authority.start("");
    let (port, secret) = (port(&daemon), any_token(&daemon));
    let request =
        format!("GET /v1/host HTTP/1.1\r\nhost: t\r\nauthorization: bearer {secret}\r\nconnection: close\r\n\r\n");
    for version in ["-tls1_2", "-tls1_3"] {
        let (done, said) = s_client(&authority, port, &[version], &request);
        assert!(done && said.contains("HTTP/1.1 200 OK") && said.contains("Verify return code: 0 (ok)"), "{said}");
    }
    let (done, said) = s_client(&authority, port, &["-tls1_1", "-cipher", "ALL:@SECLEVEL=0"], &request);
    assert!(!done && said.contains("SSL alert number") && !said.contains("HTTP/1.1"), "{said}");
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_silent_connection_is_closed_after_a_while() {
    let authority = Authority::new();
    let daemon = authority.start("remote-connections-max = 3");
    let secret = any_token(&daemon);
    // Not one byte; the beginning of a handshake; all of it and no token.
    let mut mute = TcpStream::connect(("127.0.0.1", port(&daemon))).unwrap();
    let mut half = TcpStream::connect(("127.0.0.1", port(&daemon))).unwrap();
    half.write_all(&[22, 3, 1, 2, 0, 1]).unwrap();
    let mut nobody = authority.connect(&daemon);
    assert_eq!(daemon.get("/host").0, 200, "nobody of this host waits for them");
    assert_eq!(authority.get(&daemon, Some(&secret), "/host").status, 200, "when they have gone");
    for stream in [&mut mute, &mut half] {
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let ended = stream.read(&mut [0; 1]);
        assert!(!matches!(&ended, Err(error) if error.kind() == std::io::ErrorKind::WouldBlock), "{ended:?}");
    }
    assert_eq!(rest(&mut nobody), "");
}

#[test]
fn half_a_handshake_does_not_delay_others() {
    let authority = Authority::new();
    let mut daemon = authority.start("remote-connections-max = 30");
    let secret = any_token(&daemon);
    let halves: Vec<TcpStream> = std::iter::repeat_with(|| {
        let mut half = TcpStream::connect(("127.0.0.1", port(&daemon))).unwrap();
        half.write_all(&[22, 3, 1, 2, 0, 1]).unwrap();
        half
    })
    .take(25)
    .collect();
    for _ in 0..5 {
        assert_eq!(authority.get(&daemon, Some(&secret), "/host").status, 200);
    }
    assert!(daemon.stop());
    drop(halves);
}

/// Connects from an address of this host.
fn connect_from(from: [u8; 4], port: u16) -> TcpStream {
    let socket = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    bind(&socket, &SocketAddr::from((from, 0))).unwrap();
    connect(&socket, &SocketAddr::from(([127, 0, 0, 1], port))).unwrap();
    socket.into()
}

/// Whether the peer has closed a connection.
fn has_ended(mut stream: &TcpStream) -> bool {
    stream.set_nonblocking(true).unwrap();
    !matches!(stream.read(&mut [0; 1]), Err(error) if error.kind() == std::io::ErrorKind::WouldBlock)
}

#[test]
fn one_address_without_token_does_not_block_others() {
    let authority = Authority::new();
    let daemon = authority.start("remote-connections-max = 40");
    let secret = any_token(&daemon);
    // Its connections are closed after a while: then this attempt has tested nothing, and is repeated.
    wait_until("others are answered while it is there", || {
        let mute: Vec<TcpStream> = (0..60).map(|_| connect_from([127, 0, 0, 2], port(&daemon))).collect();
        assert_eq!(authority.get(&daemon, Some(&secret), "/host").status, 200);
        let there = mute.iter().filter(|stream| !has_ended(stream)).count();
        assert!(there <= 32, "{there}");
        there == 32
    });
    // Clients with a token are not limited per address.
    let talks: Vec<_> = (0..36)
        .map(|_| {
            let mut talk = authority.connect(&daemon);
            send(&mut talk, Some(&secret), "GET /host", &Value::Null, "");
            let mut first = [0; 12];
            talk.read_exact(&mut first).unwrap();
            assert_eq!(&first, b"HTTP/1.1 200");
            talk
        })
        .collect();
    assert_eq!(talks.len(), 36);
}

#[test]
fn a_certificate_is_reloaded_unless_invalid() {
    let authority = Authority::new();
    let daemon = authority.start("");
    let secret = any_token(&daemon);
    let served = |talk: &harness::tls::Talk| talk.conn.peer_certificates().unwrap()[0].to_vec();
    let mut before = authority.connect(&daemon);
    authority.certify("next");
    replace(&authority, &daemon, "next", "certificate reloaded");
    let after = authority.connect(&daemon);
    assert_ne!(served(&before), served(&after));
    send(&mut before, Some(&secret), "GET /host", &Value::Null, "connection: close\r\n");
    assert!(rest(&mut before).starts_with("HTTP/1.1 200"), "who was connected still is");

    std::fs::write(authority.path("broken.pem"), "").unwrap();
    std::fs::copy(authority.path("next.key"), authority.path("broken.key")).unwrap();
    replace(&authority, &daemon, "broken", "keeping the old one");
    assert!(daemon.log().contains("served.pem: it contains none"), "{}", daemon.log());
    assert_eq!(served(&authority.connect(&daemon)), served(&after));
}

#[test]
fn a_daemon_without_tcp_ignores_a_reload() {
    let daemon = harness::start();
    assert!(Command::new("kill").args(["-HUP", &daemon.pid().to_string()]).status().unwrap().success());
    wait_until("it says so", || daemon.log().contains("nothing to reload"));
    assert_eq!(daemon.get("/host").0, 200);
}

#[test]
fn unsafe_api_settings_are_refused() {
    use std::os::unix::fs::PermissionsExt;
    let authority = Authority::new();
    authority.certify("served");
    authority.certify("other");
    let refused = |settings: &str| {
        let config = authority.path("taplined.toml");
        std::fs::write(&config, settings).unwrap();
        let mut checked = Command::new(env!("CARGO_BIN_EXE_taplined"));
        let output = checked.arg("--check-config").arg("--config").arg(config).output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let settings = authority.settings("");
    assert_eq!(refused(&settings), (Some(0), String::new()));
    let says = |settings: &str, what: &str| {
        let (code, said) = refused(settings);
        assert!(code == Some(4) && said.contains(what), "{code:?}: {said}");
    };
    says("[api]\nlisten = [\"127.0.0.1:0\"]", "requires TLS");
    says(&settings.replace("served.key", "other.key"), "api.key belongs to the first certificate");
    says(&settings.replace("served.key", "none.key"), "none.key");
    says(&settings.replace("served.pem", "served.key"), "served.key: it contains none");
    let key = authority.path("served.key");
    std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o644)).unwrap();
    says(&settings, "chmod o=");
}

#[test]
fn an_address_in_use_is_reported() {
    let authority = Authority::new();
    let daemon = authority.start("");
    let config = authority.settings("").replace("127.0.0.1:0", &format!("127.0.0.1:{}", port(&daemon)));
    let failed = std::panic::catch_unwind(|| start_with(&config, &[]));
    let said = failed.err().and_then(|said| said.downcast::<String>().ok()).unwrap();
    assert!(said.contains("(api.listen)") && said.contains("in use"), "{said}");
}
