//! Tests of `tapline` and the API client with `taplined` over TLS: which certificates and tokens are accepted, and the
//! messages if they are refused.

use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};

use api::client::{Client, Remote};
use api::{Code, TokenCreate};

use crate::play::{err, out, run};
use crate::taplined::Daemon;

/// A daemon that listens for TLS, with a certificate created as described in docs/api.md.
struct Served {
    daemon: Daemon,
    certificates: tempfile::TempDir,
    port: String,
}

fn openssl(words: &str, directory: &tempfile::TempDir) {
    let made = Command::new("openssl").args(words.split(' ')).current_dir(directory.path()).output();
    let made = made.unwrap_or_else(|error| panic!("openssl: {error}; `make prepare` installs it"));
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
}

impl Served {
    fn start() -> Served {
        let certificates = tempfile::tempdir().unwrap();
        let make = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 825 -subj /CN=alpha";
        openssl(
            &format!(
                "{make} -addext subjectAltName=IP:127.0.0.1 -addext basicConstraints=critical,CA:FALSE \
                      -keyout key.pem -out certificate.pem"
            ),
            &certificates,
        );
        openssl(&format!("{make} -keyout other.key -out other.pem"), &certificates);
        let path = |name: &str| certificates.path().join(name);
        let daemon = Daemon::start_with(&format!(
            "[api]\nlisten = [\"127.0.0.1:0\"]\ncertificate = {:?}\nkey = {:?}",
            path("certificate.pem"),
            path("key.pem")
        ));
        let log = daemon.log();
        let port = log.split_once("serving over TLS address=127.0.0.1:").unwrap().1;
        let port = port.split_whitespace().next().unwrap().to_owned();
        Served { daemon, certificates, port }
    }

    fn url(&self) -> String {
        format!("https://127.0.0.1:{}", self.port)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.certificates.path().join(name)
    }

    /// Creates a token; returns its secret.
    fn token(&self, words: &[&str]) -> String {
        let made = run(&self.daemon.socket(), &[&["token", "create"], words].concat());
        out(&made).trim().to_owned()
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut tapline = Command::new(env!("CARGO_BIN_EXE_tapline"));
        tapline.args(words).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        for name in ["TAPLINE_SOCKET", "TAPLINE_TOKEN", "TAPLINE_CONNECT"] {
            tapline.env_remove(name);
        }
        tapline.env("TAPLINE_CA", self.path("certificate.pem"));
        tapline
    }

    /// Runs `tapline` against the daemon's address with a token.
    fn run(&self, token: &str, words: &[&str]) -> Output {
        self.command(words).env("TAPLINE_CONNECT", self.url()).env("TAPLINE_TOKEN", token).output().unwrap()
    }

    fn follow(&self, token: &str) -> Child {
        let mut follow = self.command(&["event", "follow", "--after", "1"]);
        follow.env("TAPLINE_CONNECT", self.url()).env("TAPLINE_TOKEN", token).spawn().unwrap()
    }
}

/// Checks that a command was refused with a message that contains these words.
#[track_caller]
fn refused(output: &Output, words: &[&str]) {
    let said = err(output);
    assert!(matches!(output.status.code(), Some(4 | 6 | 10 | 11 | 64)), "{said}");
    assert!(words.iter().all(|word| said.contains(word)), "{said}");
}

#[test]
fn a_token_from_environment_or_file_is_sent() {
    let served = Served::start();
    let secret = served.token(&["ci"]);
    let here = out(&run(&served.daemon.socket(), &["host", "show", "--json"]));
    let identity = |text: &str| serde_json::from_str::<api::Host>(text).unwrap().uuid;
    assert_eq!(identity(&out(&served.run(&secret, &["host", "show", "--json"]))), identity(&here));
    let file = served.path("token");
    std::fs::write(&file, format!("{secret}\n")).unwrap();
    let (file, url, ca) = (file.to_str().unwrap(), served.url(), served.path("certificate.pem"));
    let words = ["host", "show", "--json", "--connect", &url, "--ca", ca.to_str().unwrap(), "--token-file", file];
    // Options take precedence over the environment.
    let mut asked = served.command(&words);
    let asked = asked.env("TAPLINE_SOCKET", "/nowhere").env("TAPLINE_CA", "/nowhere").env("TAPLINE_TOKEN", "nothing");
    assert_eq!(identity(&out(&asked.output().unwrap())), identity(&here));

    let listed = out(&run(&served.daemon.socket(), &["token", "list"]));
    assert!(listed.contains(" ci ") && listed.contains(" rw ") && !listed.contains(&secret), "{listed}");
    refused(&served.run(&secret, &["token", "list"]), &["token 'ci'", "as root"]);
    assert_eq!(out(&run(&served.daemon.socket(), &["token", "revoke", "ci"])), "");
    refused(&served.run(&secret, &["host", "show"]), &["revoked", "tapline token create"]);
    refused(&run(&served.daemon.socket(), &["token", "revoke", "ci"]), &["no token named 'ci'"]);
}

#[test]
fn a_limited_token_is_listed_as_such() {
    let served = Served::start();
    let secret = served.token(&["monitor", "--read-only", "--expires", "30"]);
    assert_eq!(out(&served.run(&secret, &["sr", "list", "--json"])), "[]\n");
    refused(&served.run(&secret, &["host", "drain"]), &["'monitor'", "has the role reader; this needs the role admin"]);
    let listed = out(&run(&served.daemon.socket(), &["token", "list", "--json"]));
    let [token] = &serde_json::from_str::<Vec<api::Token>>(&listed).unwrap()[..] else { panic!("{listed}") };
    let days = token.expires.unwrap().duration_since(token.created).as_hours().div_euclid(24);
    assert!(token.read_only && (29..=30).contains(&days), "{listed}");
}

#[test]
fn an_untrusted_daemon_is_not_sent_the_token() {
    let served = Served::start();
    let secret = served.token(&["ci"]);
    let with = |name: &str, value: String| {
        let mut asked = served.command(&["host", "show"]);
        asked.env("TAPLINE_CONNECT", served.url()).env("TAPLINE_TOKEN", &secret).env(name, value);
        asked.output().unwrap()
    };
    let other = served.path("other.pem").display().to_string();
    refused(&with("TAPLINE_CA", other.clone()), &["no CA in", &other, "--ca FILE"]);
    refused(&with("TAPLINE_CA", served.path("key.pem").display().to_string()), &["it contains none"]);
    let other_name = format!("https://localhost:{}", served.port);
    refused(&with("TAPLINE_CONNECT", other_name), &["is not trusted", "localhost", "subjectAltName"]);
    refused(&with("TAPLINE_CONNECT", served.url().replace("https", "http")), &["only sent over TLS"]);
    refused(&with("TAPLINE_CONNECT", "https://127.0.0.1:1".into()), &["cannot reach", "api.listen"]);
    refused(&with("TAPLINE_TOKEN", String::new()), &["--token-file", "TAPLINE_TOKEN", "tapline token create NAME"]);
    let twice = with("TAPLINE_TOKEN", format!("{secret}{secret}"));
    refused(&twice, &["TAPLINE_TOKEN holds no token"]);
    assert!(!err(&twice).contains(&secret));
    refused(&with("TAPLINE_SOCKET", "/nowhere".into()), &["both TAPLINE_SOCKET and TAPLINE_CONNECT"]);
    let mut here = served.command(&["host", "--token-file", "token", "show"]);
    refused(&here.output().unwrap(), &["--connect https://HOST:PORT"]);
}

#[test]
fn paths_on_another_host_must_be_absolute() {
    let served = Served::start();
    let secret = served.token(&["ci"]);
    let room = tempfile::tempdir().unwrap();
    for words in [
        &["sr", "create", "a", "--dir", "here"][..],
        &["vdi", "import", "a", "here", "--sr", "00000000-0000-0000-0000-000000000001", "--source-format", "raw"],
        &["vdi", "export", "00000000-0000-0000-0000-000000000001", "here", "--format", "raw"],
        &["vm", "create", "a", "--memory", "64M", "--kernel", "here"],
    ] {
        refused(&served.run(&secret, words), &["'here'", "absolute path"]);
    }
    let made = served.run(&secret, &["sr", "create", "a", "--dir", room.path().to_str().unwrap()]);
    assert_eq!(out(&made).trim().len(), 36);
    let image = served.run(&secret, &["image", "--help"]);
    assert!(image.status.success(), "what needs no daemon goes on here");
}

#[test]
fn a_follower_learns_that_its_token_was_revoked() {
    let served = Served::start();
    let secret = served.token(&["ci"]);
    let mut follow = served.follow(&secret);
    // The notice about an event number that never existed shows that the client is following.
    let mut said = BufReader::new(follow.stderr.take().unwrap());
    let mut line = String::new();
    said.read_line(&mut line).unwrap();
    assert!(line.contains("events were lost"), "{line}");
    assert_eq!(out(&run(&served.daemon.socket(), &["token", "revoke", "ci"])), "");
    let status = follow.wait().unwrap();
    let mut rest = String::new();
    said.read_to_string(&mut rest).unwrap();
    assert!(status.code() == Some(11) && rest.contains("revoked token"), "{status}: {rest}");
}

#[tokio::test]
async fn the_client_supports_the_whole_api() {
    let served = Served::start();
    let here = Client::new(served.daemon.socket());
    let asked = TokenCreate {
        uuid: None,
        name: "program".parse().unwrap(),
        role: None,
        tag: None,
        read_only: false,
        expires: None,
    };
    let made = here.token_create(&asked).await.unwrap();
    assert_eq!(here.token_create(&asked).await.unwrap_err().code, Code::Exists);
    let ca = served.path("certificate.pem");
    let remote = Remote::new(&served.url(), Some(&ca), &made.secret).unwrap();
    assert!(!format!("{remote:?}").contains(made.secret.as_str()));
    let there = Client::remote(remote);
    assert_eq!(there.host().await.unwrap().uuid, here.host().await.unwrap().uuid);
    assert_eq!(there.tokens().await.unwrap_err().code, Code::Forbidden);
    assert_eq!(here.tokens().await.unwrap(), std::slice::from_ref(&made.token));
    here.token_revoke(made.token.uuid).await.unwrap();
    assert_eq!(there.host().await.unwrap_err().code, Code::Unauthorized);
}
