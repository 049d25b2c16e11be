# The formula of a user's program for Homebrew. `.github/workflows/release.yml` fills in what is in capitals.
class Tunnel < Formula
  desc "Reach edge nodes behind NAT by name"
  homepage "https://github.com/REPOSITORY"
  url "https://github.com/REPOSITORY/releases/download/vVERSION/tunnel-VERSION-aarch64-macos.tar.gz"
  version "VERSION"
  sha256 "CHECKSUM"
  license "Apache-2.0"

  depends_on arch: :arm64
  depends_on :macos

  def install
    bin.install "tunnel"
    generate_completions_from_executable(bin/"tunnel", "completions")
  end

  service do
    run [opt_bin/"tunnel", "proxy"]
    keep_alive successful_exit: false
    error_log_path var/"log/tunnel-proxy.log"
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/tunnel --version")
  end
end
