//! Keys and certificates in each form that openssl writes: accepted, or refused with the cause and a remedy.

use std::path::Path;
use std::process::Command;

use tunnel_net::tls::params::TlsParams;
use tunnel_net::tls::{ClientAuth, IdentityFiles, TlsServerConfig};

use crate::parts::are_installed;
use crate::tunnel::PROGRAM;

/// Runs openssl in a folder.
fn openssl(dir: &Path, line: &str) {
    let ran = Command::new("openssl").current_dir(dir).args(line.split(' ')).output().unwrap();
    assert!(ran.status.success(), "openssl {line}: {}", String::from_utf8_lossy(&ran.stderr));
}

/// Loads a certificate and a key as a server does.
fn load(dir: &Path, cert: &str, key: &str) -> Result<(), String> {
    let identity = IdentityFiles { cert: dir.join(cert), key: dir.join(key) };
    let (clients, params) = (ClientAuth::Anonymous, TlsParams::default());
    let server = TlsServerConfig { identity, clients, params, alpn: Vec::new() };
    server.load().map(drop).map_err(|cause| cause.to_string())
}

/// Creates a certificate for a key, in `KEY.crt`.
fn certify(dir: &Path, key: &str) {
    let names = "-subj /CN=a.test -addext subjectAltName=DNS:a.test";
    openssl(dir, &format!("req -x509 -new -key {key} -days 90 {names} -out {key}.crt"));
}

#[test]
fn every_key_format_is_accepted_or_named_in_the_error() {
    if !are_installed(&["openssl"]) {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let dir = place.path();
    for line in [
        "ecparam -genkey -name prime256v1 -noout -out ec",
        "ecparam -genkey -name prime256v1 -out ec-with-parameters",
        "ecparam -genkey -name secp384r1 -out ec384",
        "ecparam -genkey -name secp521r1 -out ec521",
        "ec -in ec -no_public -out ec-private",
        "pkcs8 -topk8 -nocrypt -in ec -out ec-pkcs8",
        "genpkey -algorithm RSA -pkeyopt rsa_keygen_bits:2048 -out rsa",
        "rsa -in rsa -traditional -out rsa-pkcs1",
        "rsa -in rsa -text -out rsa-text",
        "genpkey -algorithm ED25519 -out ed25519",
        "ec -in ec -aes256 -passout pass:secret -out ec-encrypted",
        "pkcs8 -topk8 -in ec -passout pass:secret -out ec-pkcs8-encrypted",
        "ec -in ec -outform DER -out ec-der",
        "ec -in ec -pubout -out ec-public",
        "ecparam -genkey -name secp256k1 -noout -out ec256k1",
        "genpkey -algorithm ED448 -out ed448",
        "genpkey -algorithm RSA -pkeyopt rsa_keygen_bits:1024 -out rsa1024",
        "ecparam -genkey -name prime256v1 -noout -param_enc explicit -out ec-explicit",
    ] {
        openssl(dir, line);
    }
    for key in ["ec", "rsa", "ec-with-parameters", "ec384", "ec521", "ed25519", "ec256k1", "ed448", "rsa1024"]
    {
        certify(dir, key);
    }
    certify(dir, "ec-explicit");
    for (cert, key) in [
        ("ec", "ec"),
        ("ec", "ec-private"),
        ("ec", "ec-pkcs8"),
        ("ec-with-parameters", "ec-with-parameters"),
        ("ec384", "ec384"),
        ("ec521", "ec521"),
        ("rsa", "rsa"),
        ("rsa", "rsa-pkcs1"),
        ("rsa", "rsa-text"),
        ("ed25519", "ed25519"),
    ] {
        load(dir, &format!("{cert}.crt"), key).unwrap();
    }
    for (cert, key, expected) in [
        ("ec", "ec-encrypted", "it has an encrypted block; expected"),
        ("ec", "ec-pkcs8-encrypted", "remove the passphrase with `openssl pkey -in OLD -out NEW`"),
        ("ec", "ec-der", "`openssl pkey -inform DER -in OLD -out NEW`"),
        ("ec", "ec-public", "only the public half of the key"),
        ("ec", "ed25519", "does not belong to the certificate"),
        ("ec256k1", "ec256k1", "its kind of key is not supported; expected RSA"),
        ("ed448", "ed448", "its kind of key is not supported; expected RSA"),
        ("rsa1024", "rsa1024", "its kind of key is not supported; expected RSA"),
        ("ec-explicit", "ec-explicit", "describes its key's curve by numbers"),
    ] {
        let error = load(dir, &format!("{cert}.crt"), key).unwrap_err();
        assert!(error.contains(expected), "{key}: {error}");
    }
}

#[test]
fn every_certificate_format_is_accepted_or_named_in_the_error() {
    if !are_installed(&["openssl"]) {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let dir = place.path();
    openssl(dir, "ecparam -genkey -name prime256v1 -noout -out key");
    certify(dir, "key");
    for line in [
        "x509 -in key.crt -text -out text.crt",
        "x509 -in key.crt -outform DER -out der.crt",
        "x509 -in key.crt -trustout -addtrust serverAuth -out trusted.crt",
        "crl2pkcs7 -nocrl -certfile key.crt -out pkcs7.crt",
        "pkcs12 -export -in key.crt -inkey key -passout pass: -out pkcs12.crt",
        "pkcs12 -in pkcs12.crt -passin pass: -nodes -out both.crt",
        "req -new -key key -subj /CN=a.test -out request.crt",
    ] {
        openssl(dir, line);
    }
    for (cert, key) in [("key.crt", "key"), ("text.crt", "key"), ("both.crt", "both.crt")] {
        load(dir, cert, key).unwrap();
    }
    for (cert, expected) in [
        ("der.crt", "`openssl x509 -inform DER -in OLD -out NEW`"),
        ("pkcs12.crt", "`openssl pkcs12 -in OLD -nokeys -out NEW`"),
        ("trusted.crt", "`openssl x509 -in OLD -out NEW`"),
        ("pkcs7.crt", "`openssl pkcs7 -print_certs -in OLD -out NEW`"),
        ("request.crt", "a CA has to sign the request first"),
        ("key", "it may be the file of the key"),
    ] {
        let error = load(dir, cert, "key").unwrap_err();
        assert!(error.contains(expected), "{cert}: {error}");
    }
    // More names than a certificate can have.
    let names: Vec<_> = (0..3000).map(|n| format!("DNS:node-{n}.example.org")).collect();
    let names = format!("subjectAltName={}", names.join(","));
    openssl(
        dir,
        &format!("req -x509 -new -key key -days 90 -subj /CN=a.test -addext {names} -out large.crt"),
    );
    let error = load(dir, "large.crt", "key").unwrap_err();
    assert!(error.contains("but clients accept at most 65535; reissue it with fewer names"), "{error}");
}

#[test]
fn an_unsupported_signature_algorithm_is_named_in_the_error() {
    if !are_installed(&["openssl"]) {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let dir = place.path();
    let tunnel = |args: &[&str]| Command::new(PROGRAM).current_dir(dir).args(args).output().unwrap();
    assert!(tunnel(&["init", "made", "--name", "a.test"]).status.success());
    let text = std::fs::read_to_string(dir.join("made/server/server.toml")).unwrap();
    std::fs::write(dir.join("extensions"), "subjectAltName=DNS:a.test\nbasicConstraints=CA:FALSE\n").unwrap();
    openssl(dir, "ecparam -genkey -name prime256v1 -noout -out key");
    openssl(dir, "req -new -key key -subj /CN=a.test -out request");
    for (name, generate, digest) in [
        ("p521", "ecparam -genkey -name secp521r1 -noout", "-sha256"),
        ("p256k1", "ecparam -genkey -name secp256k1 -noout", "-sha256"),
        ("explicit", "ecparam -genkey -name prime256v1 -noout -param_enc explicit", "-sha256"),
        ("rsa1024", "genpkey -algorithm RSA -pkeyopt rsa_keygen_bits:1024", "-sha256"),
        ("sha1", "genpkey -algorithm RSA -pkeyopt rsa_keygen_bits:2048", "-sha1"),
    ] {
        openssl(dir, &format!("{generate} -out {name}.key"));
        openssl(dir, &format!("req -x509 -new -key {name}.key -days 90 -subj /CN={name} -out {name}.ca"));
        let signer = format!("-CA {name}.ca -CAkey {name}.key {digest} -CAcreateserial");
        openssl(dir, &format!("x509 -req -in request -days 60 -extfile extensions {signer} -out {name}.crt"));
        let at = |file: &str| dir.join(file).display().to_string();
        let files = [
            ("server.crt", format!("{name}.crt")),
            ("server.key", "key".into()),
            ("ca.crt", format!("{name}.ca")),
        ];
        let config = files.iter().fold(text.clone(), |config, (made, own)| {
            config.replace(&format!("/etc/tunnel/certs/{made}"), &at(own))
        });
        std::fs::write(dir.join("server.toml"), config.replace("/etc/tunnel", &at("made/server"))).unwrap();
        let checked = tunnel(&["config", "check", "server.toml"]);
        let error = String::from_utf8_lossy(&[checked.stdout, checked.stderr].concat()).into_owned();
        assert_eq!(checked.status.success(), name == "p521", "{name}: {error}");
        assert_eq!(
            error.contains("with a supported signature; set the file"),
            name != "p521",
            "{name}: {error}"
        );
        assert!(!error.contains("signature_algorithm_id"), "{name}: {error}");
    }
}
