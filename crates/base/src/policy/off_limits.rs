//! Addresses that no server dials for a client, in any config: itself, its own links, and metadata services of
//! cloud providers.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::policy::canonical_ip;

/// Returns true if this address is forbidden: loopback, link-local, unspecified, multicast, reserved, or a cloud
/// provider's metadata. Also true if such an IPv4 address is inside an IPv6 address that a gateway translates.
pub fn is_off_limits(ip: IpAddr) -> bool {
    match canonical_ip(ip) {
        IpAddr::V4(ip) => is_off_limits_v4(ip),
        IpAddr::V6(ip) => {
            ip.is_loopback()
                || ip.is_unspecified()
                || ip.is_multicast()
                || ip.is_unicast_link_local()
                || METADATA6.contains(&ip)
                || embeds_off_limits(ip)
        }
    }
}

/// Returns true if some programs would parse this name as an address: `2130706433`, `0x7f.1`, `0177.0.0.1`.
pub fn is_number(name: &str) -> bool {
    let last = name.rsplit('.').next().unwrap_or_default();
    let hex = last.strip_prefix("0x").or(last.strip_prefix("0X"));
    hex.is_some_and(|digits| digits.bytes().all(|b| b.is_ascii_hexdigit()))
        || !last.is_empty() && last.bytes().all(|b| b.is_ascii_digit())
}

fn is_off_limits_v4(ip: Ipv4Addr) -> bool {
    let first = ip.octets()[0];
    // The first block is "this network", the last ones are reserved and broadcast.
    first == 0
        || first >= 240
        || ip.is_loopback()
        || ip.is_link_local()
        || ip.is_multicast()
        || METADATA4.contains(&ip)
}

/// Returns true if a gateway translates this address to a forbidden IPv4 address. Covers NAT64 (RFC 6052, RFC 8215),
/// 6to4 (RFC 3056), Teredo (RFC 4380), ISATAP (RFC 5214) and SIIT (RFC 2765).
fn embeds_off_limits(ip: Ipv6Addr) -> bool {
    let [.., o2, o3, o4, o5, o6, o7, _, o9, o10, o11, o12, o13, o14, o15] = ip.octets();
    let is = |octets: [u8; 4]| is_off_limits_v4(octets.into());
    let last = [o12, o13, o14, o15];
    let [a, b, c, d, e, f, ..] = ip.segments();
    match [a, b, c, d, e, f] {
        [0x64, 0xff9b, 0, 0, 0, 0] | [0, 0, 0, 0, 0xffff, 0] | [.., 0 | 0x200, 0x5efe] => is(last),
        // The layout that the network uses is not known here. Read by a wrong layout, an address mostly begins with a
        // zero, and no gateway forwards addresses that really do.
        [0x64, 0xff9b, 1, ..] => {
            let layouts = [[o6, o7, o9, o10], [o7, o9, o10, o11], [o9, o10, o11, o12], last];
            let mut real = layouts.into_iter().filter(|octets| octets[0] != 0).peekable();
            real.peek().is_none() || real.any(is)
        }
        [0x2002, ..] => is([o2, o3, o4, o5]),
        // The server, and the obfuscated client.
        [0x2001, 0, ..] => is([o4, o5, o6, o7]) || is(last.map(|octet| !octet)),
        _ => false,
    }
}

/// Metadata of Azure and of Alibaba Cloud; most other providers use link-local addresses.
const METADATA4: [Ipv4Addr; 2] = [Ipv4Addr::new(168, 63, 129, 16), Ipv4Addr::new(100, 100, 100, 200)];

/// Metadata of AWS, of Google Cloud and of Oracle Cloud.
const METADATA6: [Ipv6Addr; 3] = [
    Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254),
    Ipv6Addr::new(0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254),
    Ipv6Addr::new(0xfd00, 0xc1, 0, 0, 0, 0, 0xa9fe, 0xa9fe),
];

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn off_limits_addresses_are_off_limits_in_every_ipv6_form() {
        for ip in [
            "127.0.0.1",
            "127.9.9.9",
            "0.0.0.0",
            "0.1.2.3",
            "169.254.169.254",
            "169.254.0.1",
            "168.63.129.16",
            "100.100.100.200",
            "224.0.0.1",
            "239.255.255.255",
            "255.255.255.255",
            "240.0.0.1",
            "::1",
            "::",
            "fe80::1",
            "ff02::1",
            "fd00:ec2::254",
            "fd20:ce::254",
            "fd00:c1::a9fe:a9fe",
            "::ffff:127.0.0.1",
            "::ffff:169.254.169.254",
            "::127.0.0.1",
            "64:ff9b::a9fe:a9fe",
            "64:ff9b:1::7f00:1",
            "2002:7f00:1::1",
            "2002:a9fe:a9fe::",
            "::ffff:0:127.0.0.1",
            "2001:db8::5efe:127.0.0.1",
            "2001:db8::200:5efe:169.254.169.254",
            "2001:0:a9fe:a9fe::",
            "64:ff9b:1::",
        ] {
            assert!(is_off_limits(ip.parse().unwrap()), "{ip}");
        }
        for ip in [
            "10.0.0.1",
            "192.168.1.1",
            "172.16.0.1",
            "100.100.100.201",
            "168.63.129.17",
            "8.8.8.8",
            "::ffff:10.0.0.1",
            "fd00:ec2::253",
            "fd00::1",
            "2001:db8::1",
            "64:ff9b::a00:1",
            "2002:a00:1::1",
            "64:ff9b:1::a00:1",
            "64:ff9b:1:a00:0:100::",
            "2001:db8::5efe:10.0.0.1",
            "2001:0:a00:1:8000:63bf:f5ff:fffe",
        ] {
            assert!(!is_off_limits(ip.parse().unwrap()), "{ip}");
        }
    }

    #[test]
    fn numeric_hosts_are_recognised_as_numbers() {
        for number in ["2130706433", "0x7f000001", "0X7F.1", "0177.0.0.1", "127.1", "127.0.0.0x1", "0x"] {
            assert!(is_number(number), "{number}");
        }
        for name in ["edge1", "1.example", "0x7g", "a.0b1", "10-0-0-1", ""] {
            assert!(!is_number(name), "{name}");
        }
    }

    proptest! {
        #[test]
        fn an_embedded_ipv4_address_is_off_limits_like_the_address(bits: u32) {
            let ip = Ipv4Addr::from(bits);
            let naked = is_off_limits(ip.into());
            prop_assert_eq!(is_off_limits(ip.to_ipv6_mapped().into()), naked);
            let [high, low] = [(bits >> 16) as u16, bits as u16];
            for dress in [
                [0x64, 0xff9b, 0, 0, 0, 0, high, low],
                [0x2002, high, low, 0, 0, 0, 0, 1],
                [0x2001, 0, 0xa00, 1, 0x8000, 0xffff, !high, !low],
                [0x2001, 0xdb8, 0, 0, 0x200, 0x5efe, high, low],
            ] {
                prop_assert_eq!(is_off_limits(Ipv6Addr::from(dress).into()), naked);
            }
        }

        /// RFC 6052 2.2: the octet after the first 64 bits and everything after the address are ignored.
        #[test]
        fn every_layout_of_local_nat64_keeps_an_address_off_limits(
            last in prop_oneof![Just([127, 0, 0, 1]), Just([169, 254, 169, 254]), Just([168, 63, 129, 16])],
            layout in 0..4_usize,
            noise: [u8; 16],
        ) {
            let at = [[6, 7, 9, 10], [7, 9, 10, 11], [9, 10, 11, 12], [12, 13, 14, 15]][layout];
            let mut octets = noise;
            octets[..6].copy_from_slice(&[0, 0x64, 0xff, 0x9b, 0, 1]);
            for (at, octet) in at.into_iter().zip(last) {
                octets[at] = octet;
            }
            prop_assert!(is_off_limits(Ipv6Addr::from(octets).into()));
        }

        #[test]
        fn every_layout_of_local_nat64_allows_a_private_address(low: [u8; 3], layout in 0..4_usize) {
            let at = [[6, 7, 9, 10], [7, 9, 10, 11], [9, 10, 11, 12], [12, 13, 14, 15]][layout];
            let mut octets = [0, 0x64, 0xff, 0x9b, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
            let [b, c, d] = low.map(|octet| octet % 100);
            for (at, octet) in at.into_iter().zip([10, b, c, d]) {
                octets[at] = octet;
            }
            prop_assert!(!is_off_limits(Ipv6Addr::from(octets).into()));
        }
    }
}
